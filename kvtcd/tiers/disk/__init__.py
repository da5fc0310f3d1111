"""The disk tier: records in LMDB, one environment per tenant. Nothing else in kvtcd imports lmdb."""

from kvtcd.tiers.disk.environment import MAX_TRANSACTION, Environment
from kvtcd.tiers.disk.faults import require_hardened
from kvtcd.tiers.disk.opening import UNBOUNDED
from kvtcd.tiers.disk.records import CHUNK_BYTES, KEY_BYTES, MAX_ENVELOPE, PAGE, Page, Put, footprint, fresh
from kvtcd.tiers.disk.resting import Resting, at_rest

__all__ = [
    "CHUNK_BYTES",
    "KEY_BYTES",
    "MAX_ENVELOPE",
    "MAX_TRANSACTION",
    "PAGE",
    "UNBOUNDED",
    "Environment",
    "Page",
    "Put",
    "Resting",
    "at_rest",
    "footprint",
    "fresh",
    "require_hardened",
]
