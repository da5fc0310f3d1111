"""Notices as the KV events of vLLM, which routers read to learn which engine or store has a prefix.

A batch is a msgpack array of a time and the events; an event is a map with its name as ``type`` (vLLM 0.32,
``vllm/distributed/kv_events.py``, there as msgspec structs). Here they are plain values.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.notices import Notice, What
from kvtcd.core.place import Tier

Event = dict[str, object]
VLLM_KEYS = "vllm-offload-key"
"""Hash scheme of vLLM's own keys: the hash of a chunk's last engine block (32 bytes), then the number of its
cache group (u32, big-endian)."""
HASH_BYTES = 32
CLEARED: Event = {"type": "AllBlocksCleared"}
STORED, REMOVED = "BlockStored", "BlockRemoved"
_MEDIA = {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
"""A copy on the daemon's own GPU is not told of: it is no engine's cache, and there is another one below."""
_INT_MASK = (1 << 64) - 1


def event_of(notice: Notice, identity: Callable[[str], Identity | None], *, as_int: bool) -> Event | None:
    """Return what a notice is to a router; None where it is nothing.

    Only whole blocks are told of: to a router a hash stands for `block_size` tokens, the same number always.

    Args:
        notice: of a feed.
        identity: returns the identity of a namespace, None if that is gone.
        as_int: give vLLM's hashes as it does by default: the lower 64 bits, as an integer. Keys of other
            schemes are given as they are, in bytes.
    """
    if notice.what in {What.PURGED, What.OVERFLOW}:
        return CLEARED  # vLLM can name neither a namespace nor a gap; too little known is never wrong
    medium = _MEDIA.get(notice.tier) if notice.tier else None
    if medium is None or notice.key is None or notice.namespace is None:
        return None
    whose = identity(notice.namespace)
    if whose is None or notice.tokens not in (whose.block_tokens, None):
        return None
    named = whose.hash_scheme
    common: Event = {"medium": medium, "locality": "LOCAL", "ownership": f"kvtcd:{notice.namespace}"}
    if named == VLLM_KEYS:
        common["group_idx"] = int.from_bytes(notice.key[HASH_BYTES:], "big")
    block = {"block_hashes": [_hash(notice.key, named, as_int=as_int)]}
    if notice.what is What.DROPPED:
        return {"type": REMOVED} | block | common
    parent = _hash(notice.parent, named, as_int=as_int) if notice.parent else None
    unknown: Event = {"token_ids": [], "lora_id": None, "lora_name": None}  # the daemon is never told
    stored: Event = {"parent_block_hash": parent, "block_size": whose.block_tokens}
    return {"type": STORED} | block | stored | unknown | common


def _hash(key: EngineKey, scheme: str, *, as_int: bool) -> bytes | int:
    if scheme != VLLM_KEYS:
        return bytes(key)
    block = key[:HASH_BYTES]
    return int.from_bytes(block, "big") & _INT_MASK if as_int else bytes(block)
