"""One object for what many blocks have in common, so that a million of them share a few."""

from __future__ import annotations

from kvtcd.core.entry import Kind

_NUMBERS = 1 << 16
"""Numbers to keep one object of each of."""


class Interned:
    """Kinds, sizes and positions, of which there are few."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int, int], Kind] = {}
        self._numbers: dict[int, int] = {}

    def number(self, number: int) -> int:
        """Return the one object for a number."""
        if len(self._numbers) > _NUMBERS:
            self._numbers.clear()
        return self._numbers.setdefault(number, number)

    def kind(self, namespace: int, tokens: int, raw_bytes: int) -> Kind:
        """Return the one object for a kind."""
        kind = self._kinds.get((namespace, tokens, raw_bytes))
        if kind is None:
            kind = Kind(namespace, tokens, raw_bytes)
            self._kinds[kind] = kind
        return kind

    def forget(self, namespace: int) -> None:
        """Forget the kinds of a namespace."""
        self._kinds = {kind: kind for kind in self._kinds.values() if kind.namespace != namespace}
