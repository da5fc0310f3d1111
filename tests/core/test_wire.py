"""Frames against a second, naive reader, a golden file, and everything that is not a frame."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mutations import damaged

from kvtcd.core.errors import BadField, BadMagic, Corrupt, TooLarge, Truncated
from kvtcd.core.wire import MAX_HEADER, PREFIX_BYTES, FrameParser, Head, head, parse_prefix

GOLDEN = Path(__file__).parents[1] / "data" / "frames-v1.bin"
GOLDEN_FRAMES = [
    ({"key": "00ff", "tokens": 256, "first_token": 0}, bytes(range(256))),
    ({"key": "ab" * 32, "status": "miss", "tokens": None, "tier": None}, b""),
    ({"key": "01", "status": "hit", "tokens": 3, "tier": "disk", "note": "naïve"}, b"xyz"),
]

JSON_OBJECTS = st.dictionaries(
    st.text(max_size=8), st.none() | st.integers() | st.text(max_size=8) | st.booleans(), max_size=4
)
FRAMES = st.lists(st.tuples(JSON_OBJECTS, st.binary(max_size=40)), max_size=5)


def written(frames: list[tuple[dict[str, object], bytes]]) -> bytes:
    return b"".join(head(header, len(body)) + body for header, body in frames)


def read_naively(data: bytes) -> list[tuple[dict[str, object], bytes]]:
    """The format description, spelt out without the code under test."""
    frames = []
    while data:
        assert data[:4] == b"KVTF"
        header_bytes = int.from_bytes(data[4:8], "little")
        body_bytes = int.from_bytes(data[8:16], "little")
        end = 16 + header_bytes
        frames.append((json.loads(data[16:end]), data[end : end + body_bytes]))
        data = data[end + body_bytes :]
    return frames


def parsed(pieces: list[bytes], max_body: int = 1 << 20) -> list[tuple[dict[str, object], bytes]]:
    parser = FrameParser(max_body)
    frames: list[tuple[dict[str, object], bytearray]] = []
    for piece in pieces:
        for part in parser.feed(piece):
            if isinstance(part, Head):
                frames.append((part.header, bytearray()))
            else:
                assert len(part), "an empty piece says nothing"
                frames[-1][1].extend(part)
    parser.finish()
    return [(header, bytes(body)) for header, body in frames]


@given(FRAMES)
def test_the_writer_writes_what_the_format_description_says(frames):
    assert read_naively(written(frames)) == frames


@given(FRAMES, st.data())
def test_a_run_of_frames_reads_the_same_in_any_split(frames, data):
    whole = written(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    assert parsed(pieces) == frames


def test_frames_read_the_same_byte_by_byte():
    whole = written(GOLDEN_FRAMES)

    assert parsed([whole[i : i + 1] for i in range(len(whole))]) == GOLDEN_FRAMES


def test_the_golden_file_is_what_is_written_and_reads_back():
    golden = GOLDEN.read_bytes()

    assert golden == written(GOLDEN_FRAMES)
    assert parsed([golden]) == GOLDEN_FRAMES


def test_bodies_are_views_of_what_was_fed_and_not_copies():
    data = head({}, 4) + b"body"
    _, body = FrameParser(4).feed(data)

    assert body.obj is data


@given(FRAMES.filter(len), st.data())
def test_every_cut_within_a_frame_is_truncated(frames, data):
    whole = written(frames)
    ends = {0}
    for header, body in frames:
        ends.add(max(ends) + len(head(header, len(body))) + len(body))
    cut = data.draw(st.integers(0, len(whole)).filter(lambda n: n not in ends))

    with pytest.raises(Truncated):
        parsed([whole[:cut]])


@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_refused_with_an_error_of_the_format(garbage):
    with pytest.raises(Corrupt):
        parsed([garbage])


@given(FRAMES.filter(len), st.data())
def test_a_flipped_bit_raises_an_error_of_the_format_or_reads_as_the_naive_reader_has_it(frames, data):
    whole = bytearray(written(frames))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    try:
        found = parsed([bytes(whole)])
    except Corrupt:
        return

    assert found == read_naively(bytes(whole))


@given(damaged([GOLDEN.read_bytes()]))
def test_a_damaged_run_raises_an_error_of_the_format_or_reads_as_the_naive_reader_has_it(data):
    try:
        found = parsed([data])
    except Corrupt:
        return

    assert found == read_naively(data)


def frame_with_header(text: bytes, *, header_bytes: int | None = None, body_bytes: int = 0) -> bytes:
    length = len(text) if header_bytes is None else header_bytes
    return struct.pack("<4sIQ", b"KVTF", length, body_bytes) + text


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"KVTX" + bytes(12), BadMagic),
        (frame_with_header(b"", header_bytes=0), BadField),
        (frame_with_header(b"{}", header_bytes=1), BadField),
        (frame_with_header(b"{}", header_bytes=MAX_HEADER + 1), BadField),
        (frame_with_header(b"{}", header_bytes=2**32 - 1), BadField),
        (frame_with_header(b"{}", body_bytes=101), BadField),
        (frame_with_header(b"{}", body_bytes=2**63), BadField),
        (frame_with_header(b"[]"), BadField),
        (frame_with_header(b"42"), BadField),
        (frame_with_header(b"{]"), BadField),
        (frame_with_header(b'{"a":1,"a":2}'), BadField),
        (frame_with_header(b'{"a":{"b":1,"b":1}}'), BadField),
        (frame_with_header(b'{"a":NaN}'), BadField),
        (frame_with_header(b'{"a":-Infinity}'), BadField),
        (frame_with_header(b'{"a":"\xff"}'), BadField),
        (frame_with_header(b'{"a":' + b"9" * 5000 + b"}"), BadField),
        (frame_with_header(b'{"a":' + b"[" * 8000 + b"]" * 8000 + b"}"), BadField),
    ],
)
def test_a_bad_frame_is_refused_at_its_first_fault(data, error):
    with pytest.raises(error):
        list(FrameParser(max_body=100).feed(data))


def test_a_claimed_length_allocates_nothing():
    parser = FrameParser(max_body=1 << 62)

    assert list(parser.feed(head({}, 1 << 61))) == [Head({}, 1 << 61)]
    with pytest.raises(Truncated):
        parser.finish()


def test_a_header_over_the_limit_is_not_written():
    assert len(head({"a": "x" * (MAX_HEADER - 8)}, 0)) == PREFIX_BYTES + MAX_HEADER
    with pytest.raises(TooLarge):
        head({"a": "x" * (MAX_HEADER - 7)}, 0)


def test_a_body_of_exactly_the_limit_is_allowed():
    assert parse_prefix(struct.pack("<4sIQ", b"KVTF", 2, 100), 100) == (2, 100)
    with pytest.raises(BadField):
        parse_prefix(struct.pack("<4sIQ", b"KVTF", 2, 101), 100)
