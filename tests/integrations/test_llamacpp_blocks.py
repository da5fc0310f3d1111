"""Names and pieces of slot files, against the hashes written out."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.errors import BadMagic, BadVersion
from kvtcd.core.keys import token_array
from kvtcd.integrations import llamacpp_blocks
from kvtcd.integrations.llamacpp_blocks import BLOCK_UNITS, UNIT, Head, chained, head_key, pieces, prefix_keys


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9))
def test_every_beginning_of_a_prompt_has_the_name_of_a_file_with_these_tokens(namespace, tokens):
    keys = list(prefix_keys(namespace, token_array(tokens)))

    assert keys == [head_key(namespace, token_array(tokens[:end])) for end in range(1, len(tokens) + 1)]
    data = b"kvtcd-llamacpp-v1" + namespace + struct.pack(f"<{len(tokens)}I", *tokens)
    assert keys[-1] == hashlib.blake2b(data, digest_size=32).digest()


@pytest.mark.parametrize("nbytes", [1, UNIT, UNIT + 1, 3 * UNIT - 1, 4 * UNIT, 9 * UNIT + 5])
def test_pieces_are_whole_units_and_give_the_file_back(monkeypatch, nbytes):
    monkeypatch.setattr(llamacpp_blocks, "BLOCK_UNITS", 4)
    monkeypatch.setattr(llamacpp_blocks, "_PIECE", 4 * UNIT)
    data = bytes(n % 251 for n in range(nbytes))
    head = Head.of(memoryview(data))
    keys, cut = head.keys(), list(pieces(memoryview(data)))
    told = list(chained(keys, nbytes))

    assert b"".join(cut)[:nbytes] == data
    assert [len(piece) for piece in cut] == [block.tokens * UNIT for block in told]
    assert [block.tokens for block in told[:-1]] == [4] * (len(told) - 1)
    assert [block.key for block in told] == keys
    assert [block.parent for block in told] == [None, *keys[:-1]]
    assert len(set(keys)) == len(keys) == -(-nbytes // (4 * UNIT))


def test_a_head_is_one_unit_and_says_length_and_digest():
    head = Head.of(memoryview(b"slot"))
    data = memoryview(head.to_bytes())

    assert bytes(data[:52]) == b"kvtcdslt" + struct.pack("<IQ", 1, 4) + hashlib.sha256(b"slot").digest()
    assert len(data) == UNIT
    assert Head.from_bytes(data) == head == Head(4, hashlib.sha256(b"slot").digest())
    with pytest.raises(BadMagic):
        Head.from_bytes(memoryview(bytes(UNIT)))
    with pytest.raises(BadVersion, match="version 2"):
        Head.from_bytes(memoryview(b"kvtcdslt" + struct.pack("<I", 2) + bytes(UNIT)))


def test_files_with_other_bytes_share_no_piece():
    one, other = (Head.of(memoryview(data)) for data in (b"a" * 10, b"b" * 10))
    assert not set(one.keys()) & set(other.keys())
    assert UNIT * BLOCK_UNITS == 4 << 20
