"""What routers are told: in vLLM's words, and never more than is true."""

from __future__ import annotations

import pytest

from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.kv_events import CLEARED, event_of
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.core.notices import Notice, What
from kvtcd.core.place import Tier
from kvtcd.integrations.vllm_identity import KEY_BYTES

WHOLE = 64
IDENTITIES = {
    name: Identity(
        engine="e", hash_scheme=scheme, model="m", weights="ab" * 32, rope=None, block_tokens=WHOLE,
        layout=Layout((Stream("pages", 1, 64, rope=False),), 1, Dtype.F16),
    )
    for name, scheme in {"v": "vllm-offload-key", "t": "kvtcd-chain-v1"}.items()
}  # fmt: skip
HASH, PARENT = bytes(range(32)), bytes(range(1, 33))
OURS = EngineKey(HASH + b"\0\0\0\2")
AS_INT = 0x18191A1B1C1D1E1F
"""The last eight bytes of `HASH`, as vLLM's `maybe_convert_block_hash` makes it."""
UNKNOWN = {"token_ids": [], "lora_id": None, "lora_name": None}
ABOUT = {"locality": "LOCAL", "ownership": "kvtcd:v", "group_idx": 2}


def told(notice: Notice, *, as_int: bool = True) -> object:
    return event_of(notice, IDENTITIES.get, as_int=as_int)


def stored(namespace: str = "v", key: EngineKey = OURS, tokens: int = WHOLE, **rest: object) -> Notice:
    return Notice(What.STORED, "b-1", namespace, key, tier=Tier.HOST, tokens=tokens, first_token=0, **rest)


def test_a_new_block_of_vllm() -> None:
    assert len(OURS) == KEY_BYTES
    expected = {
        "type": "BlockStored", "block_hashes": [AS_INT], "parent_block_hash": None, "block_size": 64,
        "medium": "CPU",
    } | UNKNOWN | ABOUT  # fmt: skip
    assert told(stored()) == expected
    assert told(stored(), as_int=False) == expected | {"block_hashes": [HASH]}


def test_a_parent_is_named_as_the_block_is() -> None:
    parent = EngineKey(PARENT + b"\0\0\0\2")
    event = told(stored(parent=parent))
    assert isinstance(event, dict)
    assert event["parent_block_hash"] == 0x191A1B1C1D1E1F20


def test_a_block_of_another_engine_keeps_its_key() -> None:
    event = told(stored("t", EngineKey(b"\x07" * 32)))
    assert isinstance(event, dict)
    assert event["block_hashes"] == [b"\x07" * 32]
    assert "group_idx" not in event


def test_a_block_that_moves_is_stored_there_and_removed_here() -> None:
    there = told(Notice(What.MOVED, "b", "v", OURS, tier=Tier.DISK, source=Tier.HOST, tokens=64))
    here = told(Notice(What.DROPPED, "b", "v", OURS, tier=Tier.HOST, reason="evicted", left=(Tier.DISK,)))

    assert isinstance(there, dict)
    assert (there["type"], there["medium"], there["block_size"]) == ("BlockStored", "STORAGE", 64)
    assert here == {"type": "BlockRemoved", "block_hashes": [AS_INT], "medium": "CPU"} | ABOUT


@pytest.mark.parametrize(
    "notice", [Notice(What.PURGED, "b", "v"), Notice(What.OVERFLOW, "b")], ids=["purged", "overflow"]
)
def test_what_vllm_has_no_word_for_clears_everything(notice: Notice) -> None:
    assert told(notice) == CLEARED


@pytest.mark.parametrize(
    "notice",
    [
        Notice(What.MOVED, "b", "v", OURS, tier=Tier.GPU, source=Tier.HOST, tokens=64),
        Notice(What.DROPPED, "b", "v", OURS, tier=Tier.GPU, reason="evicted"),
        Notice(What.DROPPED, "b", "v", None, tier=Tier.DISK, reason="damaged"),
        stored(tokens=WHOLE - 1),
        Notice(What.MOVED, "b", "v", OURS, tier=Tier.DISK, source=Tier.HOST, tokens=1),
        Notice(What.DROPPED, "b", "v", OURS, tier=Tier.HOST, tokens=33, reason="superseded"),
        stored("gone"),
    ],
    ids=["to-gpu", "from-gpu", "unreadable", "partial", "partial-moves", "partial-goes", "of-no-namespace"],
)
def test_what_is_nothing_to_a_router(notice: Notice) -> None:
    assert told(notice) is None
