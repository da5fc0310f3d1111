"""A layout for bytes whose inside is not known: it has the right size, and says no more."""

from __future__ import annotations

from collections.abc import Sequence

from kvtcd.core.errors import BadIdentity
from kvtcd.core.layout import Dtype, Layout, Stream


def opaque(nbytes: int, tokens: int, dtypes: Sequence[str], *, layers: int = 1) -> tuple[Layout, str]:
    """Return a layout, and what `scales` of an identity has to tell apart beside it.

    Args:
        nbytes: of a block.
        tokens: of a block.
        dtypes: of what is in it, by torch's names.
        layers: of which it has equal parts, as far as that is known.

    Raises:
        BadIdentity: the bytes do not divide by tokens and elements.
    """
    plain = [dtype for dtype in Dtype if set(dtypes) == {dtype}]
    dtype = plain[0] if plain else Dtype.F16
    elements, odd = divmod(nbytes, tokens * dtype.itemsize)
    if odd or not elements:
        raise BadIdentity("layout", f"{nbytes} bytes of a block do not divide by {tokens} tokens")
    layers = layers if elements % layers == 0 else 1
    scales = "none" if set(dtypes) <= set(Dtype) else "-".join(dtypes)[:256] or "-"
    return Layout((Stream("pages", 1, elements // layers, rope=False),), layers, dtype), scales
