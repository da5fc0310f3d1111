"""JSON forms: round trips, and for everything else an error that names the field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.errors import BadKey, BadRequest
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.core.matches import BlockMatch, LeaseInfo, Matches
from kvtcd.core.messages import (
    BlockHead,
    BlockResult,
    Found,
    Info,
    Keys,
    NamespaceInfo,
)
from kvtcd.core.operation import Operation
from kvtcd.core.place import Tier

KEYS = st.binary(min_size=1, max_size=64).map(EngineKey)
TOKENS = st.integers(1, 1 << 16)
HEADS = st.lists(KEYS, min_size=3, max_size=3, unique=True).flatmap(
    lambda keys: st.builds(
        BlockHead,
        key=st.just(keys[0]),
        tokens=TOKENS,
        first_token=st.none() | st.integers(0, (1 << 62) - 1),
        parent=st.sampled_from([None, keys[1]]),
        supersedes=st.sampled_from([None, keys[2]]),
    )
)
RESULTS = st.builds(
    BlockResult, KEYS, st.sampled_from(["stored", "duplicate", "dropped"]), st.none() | st.text(min_size=1)
)
TIERS = st.sampled_from(list(Tier))


def through_json(body: object) -> object:
    return json.loads(json.dumps(body))


@given(HEADS)
def test_a_block_head_survives_json_and_a_query(head):
    assert BlockHead.from_json(through_json(head.to_json())) == head


@given(st.one_of(st.builds(Found, KEYS), st.builds(Found, KEYS, TOKENS, TIERS)))
def test_a_frame_header_of_an_answer_survives_json(found):
    assert Found.from_json(through_json(found.to_json())) == found


STATES = st.sampled_from(["running", "done", "failed", "cancelled"])


@given(st.lists(RESULTS, max_size=3), STATES, st.integers(0, 9), st.integers(0, 9), st.none() | st.text())
def test_an_operation_survives_json(results, state, total, done, detail):
    operation = Operation("0" * 32, state, total, done, tuple(results), detail)

    assert Operation.from_json(through_json(operation.to_json())) == operation


@given(
    st.lists(st.builds(BlockMatch, KEYS, TOKENS, st.none() | TIERS), max_size=6),
    st.lists(TOKENS, max_size=3),
    st.none() | st.builds(LeaseInfo, st.text(max_size=8), st.floats(0, 3600), st.integers(0, 99)),
)
def test_a_match_counts_its_prefix_and_survives_json(blocks, partials, lease):
    matches = replace(Matches.of(blocks, tuple(partials)), lease=lease)
    body = matches.to_json()

    present = [block.tier is not None for block in blocks]
    prefix = present.index(False) if False in present else len(present)
    assert body["prefix_blocks"] == prefix
    assert body["prefix_tokens"] == sum(block.tokens for block in blocks[:prefix])
    assert body["bitmap"] == "".join("01"[p] for p in present)
    assert body["tiers"] == [block.tier for block in blocks]
    assert Matches.from_json(through_json(body)) == matches


def test_info_survives_json():
    info = Info("0.1.0", 1, "ab")

    assert Info.from_json(through_json(info.to_json())) == info


@given(st.lists(KEYS, max_size=4))
def test_a_list_of_keys_survives_json(keys):
    assert Keys.from_json(through_json(Keys(tuple(keys)).to_json())) == Keys(tuple(keys))


def test_an_answer_of_a_newer_daemon_is_understood():
    body = BlockResult(EngineKey(b"\1"), "stored").to_json() | {"colour": "red"}

    assert BlockResult.from_json(body) == BlockResult(EngineKey(b"\1"), "stored")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (None, "BlockHead"),
        ([], "BlockHead"),
        ({}, "key"),
        ({"key": 1, "tokens": 1}, "key"),
        ({"key": "AB", "tokens": 1}, "key"),
        ({"key": "abc", "tokens": 1}, "key"),
        ({"key": "", "tokens": 1}, "key"),
        ({"key": "ab" * 65, "tokens": 1}, "key"),
        ({"key": "ab"}, "tokens"),
        ({"key": "ab", "tokens": 0}, "tokens"),
        ({"key": "ab", "tokens": True}, "tokens"),
        ({"key": "ab", "tokens": 1.0}, "tokens"),
        ({"key": "ab", "tokens": "1"}, "tokens"),
        ({"key": "ab", "tokens": 1 << 17}, "tokens"),
        ({"key": "ab", "tokens": 1, "first_token": -1}, "first_token"),
        ({"key": "ab", "tokens": 1, "first_token": 1 << 62}, "first_token"),
        ({"key": "ab", "tokens": 1, "parent": "zz"}, "key"),
        ({"key": "ab", "tokens": 1, "supersedes": 5}, "supersedes"),
        ({"key": "ab", "tokens": 1, "parent": "ab"}, "parent"),
        ({"key": "ab", "tokens": 1, "supersedes": "ab"}, "supersedes"),
        ({"key": "ab", "tokens": 1, "tenant": "uid:0"}, "tenant"),
    ],
)
def test_a_bad_block_head_is_refused_by_name(body, field):
    with pytest.raises(BadRequest) as caught:
        BlockHead.from_json(body)
    assert caught.value.field == field


@pytest.mark.parametrize("body", [{}, {"keys": None}, {"keys": "ab"}, {"keys": [1]}, {"keys": [], "x": 1}])
def test_bad_lists_of_keys_are_refused(body):
    with pytest.raises(BadRequest):
        Keys.from_json(body)


def test_a_bad_key_in_a_list_is_shown():
    with pytest.raises(BadKey, match="'XY'"):
        Keys.from_json({"keys": ["ab", "XY"]})


def test_namespace_info_survives_json():
    layout = kv_layout(layers=2, kv_heads=1, head_dim=4, dtype=Dtype.BF16)
    identity = Identity.from_json(
        {
            "engine": "test",
            "hash_scheme": "test",
            "model": "m",
            "weights": "0" * 64,
            "layout": layout.to_json(),
            "rope": {"kind": "default", "theta": "10000.0", "rotary_dim": 4},
        }
    )
    for packed in (("lossless", "no profile", None, None), ("kvtc2 ratio 32", None, "5f" * 32, 0.0067)):
        info = NamespaceInfo("demo", identity.digest, *packed, identity)

        assert NamespaceInfo.from_json(through_json(info.to_json())) == info
