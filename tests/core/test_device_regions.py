"""What is said of memory of a GPU on the wire: golden, strict, and the same on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.device_regions import HANDLE_BYTES, MAX_MESSAGE, DeviceOffer
from kvtcd.core.errors import BadField, BadRequest
from kvtcd.core.regions import HELLO, MAX_OFFSET

GOLDEN = Path(__file__).parent / "golden" / "device-offer-v1.bin"
OFFER = DeviceOffer(
    "00112233445566778899aabbccddeeff", bytes(range(64)), 4096, 8 << 20, bytes(range(64, 128))
)
HANDLES = st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES)
OFFERS = st.builds(
    DeviceOffer,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    HANDLES,
    st.integers(0, MAX_OFFSET),
    st.integers(1, MAX_OFFSET),
    st.none() | HANDLES,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_the_message_is_what_it_has_always_been():
    assert OFFER.to_message() == GOLDEN.read_bytes()
    assert DeviceOffer.from_message(GOLDEN.read_bytes()) == OFFER


def test_it_is_the_json_that_is_written_down():
    assert json.loads(GOLDEN.read_bytes()[len(HELLO) :]) == {
        "uuid": "00112233445566778899aabbccddeeff",
        "handle": bytes(range(64)).hex(),
        "offset": 4096,
        "bytes": 8388608,
        "event": bytes(range(64, 128)).hex(),
    }


@given(OFFERS)
def test_an_offer_arrives_as_it_was_sent(offer):
    message = offer.to_message()
    assert len(message) <= MAX_MESSAGE
    assert message.startswith(HELLO)
    assert DeviceOffer.from_message(message) == offer


@given(OFFERS, st.sampled_from(["uuid", "handle", "offset", "bytes", "event"]), JSON)
def test_a_field_is_right_or_named(offer, name, value):
    body = offer.to_json() | {name: value}
    try:
        read = DeviceOffer.from_json(body)
    except BadRequest as refused:
        named = refused.field
    else:
        named = None
        assert read.to_json() == {n: v for n, v in body.items() if v is not None}
    assert named in {None, name}


@given(OFFERS, st.sampled_from(["uuid", "handle", "offset", "bytes"]))
def test_what_is_missing_is_named(offer, name):
    body = offer.to_json()
    del body[name]
    with pytest.raises(BadRequest) as refused:
        DeviceOffer.from_json(body)
    assert refused.value.field == name


@given(OFFERS, st.text(min_size=1))
def test_what_is_not_known_is_refused(offer, name):
    if name in {"uuid", "handle", "offset", "bytes", "event"}:
        return
    with pytest.raises(BadRequest) as refused:
        DeviceOffer.from_json(offer.to_json() | {name: 1})
    assert refused.value.field == name


@given(st.binary())
def test_other_bytes_are_an_error_of_ours(data):
    with pytest.raises((BadRequest, BadField)):
        DeviceOffer.from_message(HELLO + data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uuid", "00112233445566778899AABBCCDDEEFF"),
        ("uuid", "00112233445566778899aabbccddeeff\n"),
        ("uuid", "GPU-00112233-4455-6677-8899-aabbccddeeff"),
        ("handle", "00" * 63),
        ("handle", "\u06600" * 64),
        ("offset", -1),
        ("bytes", 0),
        ("bytes", True),
        ("bytes", MAX_OFFSET + 1),
        ("event", ""),
    ],
)
def test_nearly_right_is_not_right(name, value):
    with pytest.raises(BadRequest) as refused:
        DeviceOffer.from_json(OFFER.to_json() | {name: value})
    assert refused.value.field == name
