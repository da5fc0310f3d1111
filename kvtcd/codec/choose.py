"""Which codec writes the blocks of a namespace, and the one decoder that reads whatever was written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtcd.codec.coded import Coder
from kvtcd.codec.kvtc import Kvtc
from kvtcd.codec.lossless import Lossless
from kvtcd.codec.ports import Encoder
from kvtcd.codec.profile import Profile
from kvtcd.core.blob import Blob, CodecId
from kvtcd.core.errors import BadField, BadRequest
from kvtcd.core.identity import Identity, Rope
from kvtcd.core.layout import Layout

CODECS = ("lossless", "kvtc")
"""Names of the codecs in policies."""


def encoder_for(
    identity: Identity,
    profile: Profile | None,
    *,
    name: str,
    ratio: int,
    sinks: int,
    window: int,
    device: torch.device | str = "cpu",
) -> Encoder:
    """Return the encoder of a namespace's blocks.

    Args:
        identity: of the namespace.
        profile: for its model; None has every block stored losslessly.
        name: one of `CODECS`.
        ratio: nominal ratio, for codecs that have one.
        sinks: first tokens of a sequence to keep exact.
        window: last tokens of a sequence to keep exact.
        device: where raw blocks lie.

    Raises:
        BadRequest: an unknown codec, or a ratio the profile has no plan for.
        ProfileMismatch: a profile of another model.
    """
    if name not in CODECS:
        raise BadRequest("codec.name", f"{name!r} is not one of {', '.join(CODECS)}")
    if name == "lossless" or profile is None:
        return Lossless(identity.layout)
    profile.check(identity)
    if ratio not in profile.ratios:
        known = ", ".join(str(known) for known in profile.ratios)
        raise BadRequest("codec.ratio", f"the profile has plans for {known}, not for {ratio}")
    return Kvtc(identity.layout, identity.rope, profile, ratio, sinks=sinks, window=window, device=device)


class Decoder:
    """Decodes every blob of a layout, whichever codec, profile and plan wrote it.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        lookup: profile by digest; raises `UnknownProfile` for one it does not have.
        device: where raw blocks lie.
    """

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        lookup: Callable[[bytes], Profile],
        device: torch.device | str = "cpu",
    ) -> None:
        self._layout, self._rope, self._lookup, self._device = layout, rope, lookup, device
        self._lossless = Lossless(layout)
        self._coders: dict[bytes, Coder] = {}

    def decode(self, blob: Blob, out: Tensor) -> None:
        """Decode a blob; see `BlobDecoder`.

        Raises:
            UnknownProfile: the blob's profile is not to be had.
        """
        match blob.header.codec:
            case CodecId.LOSSLESS:
                self._lossless.decode(blob, out)
            case CodecId.KVTC:
                self._coder(blob.header.profile).decode(blob, out)
            case CodecId.RAW:
                raise BadField("blob", "a raw block has no blob")

    def _coder(self, digest: bytes) -> Coder:
        if digest not in self._coders:
            self._coders[digest] = Coder(self._layout, self._rope, self._lookup(digest), self._device)
        return self._coders[digest]
