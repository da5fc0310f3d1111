"""Slot files put together by hand, from their description: that is read, and nothing else is taken."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.errors import BadField, BadMagic, BadVersion, Corrupt, Truncated, UnsupportedCache
from kvtcd.integrations.llamacpp_file import Form, read


def words(tokens: list[int], *, packed: bool = True, media: int = 0) -> bytes:
    told = [-1, 1, len(tokens), *tokens, media] if packed else tokens
    return struct.pack(f"<III{len(told)}i", 0x67677371, 4, len(told), *told)


def rows(cells: int, kind: int, nbytes: int) -> bytes:
    return struct.pack("<IQ", kind, nbytes) + bytes(cells * nbytes)


def columns(cells: int, kind: int, size: int, width: int) -> bytes:
    return struct.pack("<III", kind, size, width) + bytes(cells * size * width)


def stream(
    cells: int,
    *,
    layers: int = 2,
    transposed: bool = False,
    kinds: tuple[int, int] = (1, 1),
    rotations: tuple[int, int] = (0, 0),
) -> bytes:
    if not cells:
        return struct.pack("<I", 0)
    meta = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(cells))
    keys = rows(cells, kinds[0], 34) * layers
    values = (columns(cells, kinds[1], 2, 16) if transposed else rows(cells, kinds[1], 32)) * layers
    shape = struct.pack("<IIII", transposed, layers, *rotations)
    return struct.pack("<I", cells) + meta + shape + keys + values


def whole(tokens: list[int], *streams: bytes, **packing: bool) -> bytes:
    return words(tokens, **packing) + struct.pack("<I", len(streams)) + b"".join(streams)


def test_tokens_and_form_are_read():
    held = read(memoryview(whole([5, 6, 7], stream(3))))
    assert held.tokens.tolist() == [5, 6, 7]
    assert held.form == Form(1, transposed=False, layers=2, keys=("f16:34",), values=("f16:32",))
    assert str(held.form) == "s1 l2 rows k=f16:34 v=f16:32"


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (
            whole([5], stream(0), stream(1)),
            Form(2, transposed=False, layers=2, keys=("f16:34",), values=("f16:32",)),
        ),
        (
            whole([5], stream(1, transposed=True, layers=3)),
            Form(1, transposed=True, layers=3, keys=("f16:34",), values=("f16:32",)),
        ),
        (
            whole([5], stream(1, kinds=(8, 99))),
            Form(1, transposed=False, layers=2, keys=("q8_0:34",), values=("99:32",)),
        ),
        (
            whole([5], stream(1, kinds=(8, 8), rotations=(128, 64))),
            Form(1, transposed=False, layers=2, keys=("q8_0:34",), values=("q8_0:32",), rotations=(128, 64)),
        ),
        (whole([], stream(0)), None),
    ],
)
def test_every_difference_of_form_is_told(data, form):
    assert read(memoryview(data)).form == form


def test_caches_under_other_rotations_are_other_ones():
    said = {
        str(read(memoryview(whole([5], stream(1, kinds=(8, 8), rotations=rotations)))).form)
        for rotations in [(0, 0), (64, 0), (0, 64), (64, 64), (128, 64)]
    }
    assert len(said) == 5
    assert "s1 l2 rows r=64+0 k=q8_0:34 v=q8_0:32" in said


def test_prompts_of_older_servers_are_plain_tokens():
    assert read(memoryview(whole([5, 6], stream(2), packed=False))).tokens.tolist() == [5, 6]


@given(st.integers(0, len(whole([5, 6, 7], stream(3))) - 1))
def test_a_file_that_was_cut_is_refused(length):
    with pytest.raises(Truncated):
        read(memoryview(whole([5, 6, 7], stream(3)))[:length])


@given(st.integers(0, len(whole([5, 6, 7], stream(3))) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_what_is_said_or_is_cache(at, flip):
    data = bytearray(whole([5, 6, 7], stream(3)))
    data[at] ^= flip
    try:
        held = read(memoryview(data))
    except (Corrupt, UnsupportedCache):
        return
    assert held.form is not None


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"GGUF" + whole([5], stream(1))[4:], BadMagic, "does not begin"),
        (struct.pack("<II", 0x67677371, 3), BadVersion, "has version 3"),
        (struct.pack("<III3i", 0x67677371, 4, 3, -1, 2, 0), BadVersion, "prompt of a version"),
        (struct.pack("<III4i", 0x67677371, 4, 4, -1, 1, 9, 5), BadField, "1 words for 9 tokens"),
        (words([5], media=2) + struct.pack("<I", 1) + stream(1), UnsupportedCache, "images or sound"),
        (whole([5], stream(1)) + b"more", UnsupportedCache, "4 bytes behind a plain cache"),
        (whole([5], stream(1), stream(1)), UnsupportedCache, "several streams"),
        (whole([5], struct.pack("<IiI", 1, 0, 1 << 20)), UnsupportedCache, "cells of another form"),
        *(
            (
                whole([5], struct.pack("<IiIiIIII", 1, 0, 1, 0, *shape)),
                UnsupportedCache,
                "another form than that of plain attention",
            )
            for shape in [(0, 2, 1, 0), (0, 2, 0, 96), (2, 2, 0, 0)]
        ),
    ],
)
def test_what_is_no_plain_slot_file_is_refused_with_the_reason(data, error, match):
    with pytest.raises(error, match=match):
        read(memoryview(data))
