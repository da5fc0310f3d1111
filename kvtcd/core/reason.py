"""Why something that was asked of the catalog was not done, or a block was lost."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a ticket was denied or a copy was lost."""

    NOT_FOUND = "not-found"
    DUPLICATE = "duplicate"
    FILLING = "filling"
    """Another request is storing this very block right now."""
    GOING = "going"
    """A block of this key was deleted, and leases keep its bytes for now."""
    TOO_LARGE = "too-large"
    """It can never fit the tier."""
    NO_TIER = "no-tier"
    """The policy has no tier below for it."""
    DAMAGED = "damaged"
    """The stored bytes failed their check; the copy is dropped."""
    FAILED = "failed"
    """The move could not be completed; the source is unharmed."""
    DRIFT = "drift"
    """Blocks are unlike what their profile was made from, and their policy does not have such packed."""
    DELETED = "deleted"
    EXPIRED = "expired"
    """Its time to live is over."""
    NOT_ADMITTED = "not-admitted"
    """The policy does not want it: seen too seldom, or worth less than all that would have to go for it."""
    PRESSURE = "pressure"
    """Newcomers needed its room, and the packer was behind."""
    PINNED = "pinned"
    """Leases hold as much as they may already."""
