"""Notices on the wire."""

from __future__ import annotations

import pytest

from kvtcd.core.errors import BadField, BadRequest
from kvtcd.core.keys import EngineKey
from kvtcd.core.notices import Notice, NoticeParser, What
from kvtcd.core.place import Tier


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


def test_notices_survive_the_wire_in_any_pieces():
    whole = [
        Notice(What.STORED, "b-1", "n", key(1), b"", Tier.HOST, tokens=3, first_token=0, parent=key(2)),
        Notice(What.MOVED, "b-2", "n", key(1), b"s", Tier.DISK, Tier.HOST),
        Notice(What.DROPPED, "b-3", "n", None, b"", Tier.DISK, reason="evicted", left=(Tier.HOST,)),
        Notice(What.PURGED, "b-4", "n"),
        Notice(What.OVERFLOW, "b-5"),
    ]
    data = b":\n\n" + b"id: 9\nevent: later\ndata: {}\n\n" + b"".join(n.frame() for n in whole)
    for size in (1, 7, len(data)):
        parser = NoticeParser()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [n for piece in pieces for n in parser.feed(piece)] == whole


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"event: stored\ndata: {\n\n", BadField),
        (b'event: moved\ndata: {"key": 3}\n\n', BadRequest),
        (b'event: stored\ndata: {"salt": "?"}\n\n', BadRequest),
        (b"x" * (16 << 10) + b"x", BadField),
    ],
)
def test_what_is_no_notice_is_refused(data, error):
    with pytest.raises(error):
        list(NoticeParser().feed(data))
