"""How often a block was asked for lately, whether it is here or not: a count-min sketch that fades."""

from __future__ import annotations

import struct

from kvtcd.core.keys import RecordKey

WIDTH = 1 << 21
"""Counters of one row: 8 MiB in all, enough for about two million different blocks within one period."""
PERIOD = 900.0
"""Seconds in which what was seen comes to count half."""
_UNIT = 4
"""A sight counts four, so that it fades in steps before it is forgotten."""
_FULL = 255
_HALVE = bytes(count // 2 for count in range(256))
_FOUR = struct.Struct("<4Q")


class Sightings:
    """A count-min sketch with conservative update (Cormode, Muthukrishnan 2005; Estan, Varghese 2002).

    It never counts too little (up to 63 sights), and counts too much only where keys meet in all four rows.
    Record keys are HMACs, so nobody can make them meet, and they need no further hashing.

    Args:
        period: seconds after which all counts are halved.
        width: counters of a row, a power of two.

    Attributes:
        period, width: as given.
        now: seconds of whoever keeps it; set it before use.
    """

    def __init__(self, period: float = PERIOD, width: int = WIDTH) -> None:
        self.now = 0
        self.period, self.width = period, width
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(4)]
        self._fades: float | None = None

    def note(self, key: RecordKey) -> float:
        """Note one sight of a key; return the count, this one included."""
        self._fade()
        cells = self._cells(key)
        count = min(self._least(cells) + _UNIT, _FULL)
        for row, cell in zip(self._rows, cells, strict=True):
            row[cell] = max(row[cell], count)
        return count / _UNIT

    def count(self, key: RecordKey) -> float:
        """Return how often a key was seen, older sights counting less."""
        if self._fades is None:
            return 0.0  # nothing was seen yet
        self._fade()
        return self._least(self._cells(key)) / _UNIT

    def _least(self, cells: list[int]) -> int:
        return min(row[cell] for row, cell in zip(self._rows, cells, strict=True))

    def _cells(self, key: RecordKey) -> list[int]:
        return [word & self._mask for word in _FOUR.unpack(key)]

    def _fade(self) -> None:
        if self._fades is None:
            self._fades = self.now + self.period
        if self.now >= self._fades:
            missed = int((self.now - self._fades) // self.period) + 1
            self._fades += missed * self.period
            for _ in range(min(missed, _FULL.bit_length())):
                for row in self._rows:
                    row[:] = row.translate(_HALVE)
