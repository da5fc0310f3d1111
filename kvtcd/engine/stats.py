"""The daemon at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """Sums of one tier, in bytes and copies."""

    capacity: int
    used: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Stats:
    """The daemon at one moment."""

    boot_id: str
    uptime_s: float
    blocks: int
    waiting: int
    demoting: int
    tiers: dict[str, TierStats]
    namespaces: int
