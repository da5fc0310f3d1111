"""Where a copy can lie: tiers, forms, and the places that they make."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Tier(StrEnum):
    """A kind of memory, fastest first."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"
    """A store that several daemons share. The catalog does not know what is there: it is asked."""


class Form(StrEnum):
    """What the bytes of a copy are."""

    RAW = "raw"
    PACKED = "packed"


class Place(IntEnum):
    """A tier and a form; a block has at most one copy in each. Fastest first.

    Raw and packed copies on the host share its bytes.
    """

    GPU = 0
    HOST = 1
    PACKED = 2
    DISK = 3

    @property
    def tier(self) -> Tier:
        """Whose bytes it takes."""
        return _TIERS[self]

    @property
    def form(self) -> Form:
        """What its bytes are."""
        return _FORMS[self]

    def __str__(self) -> str:
        """Return its name in lower case."""
        return self.name.lower()


_TIERS = (Tier.GPU, Tier.HOST, Tier.HOST, Tier.DISK)
_FORMS = (Form.RAW, Form.RAW, Form.PACKED, Form.PACKED)
MEMORY = (Place.GPU, Place.HOST, Place.PACKED)
"""Places that a restart empties."""
BASES = (Place.HOST, Place.PACKED, Place.DISK)
"""Places that keep a block; a copy on a GPU only comes on top of one of these."""
