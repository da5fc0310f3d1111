"""Exports: golden bytes, flipped bits, cuts, frames that were moved, and whatever Hypothesis thinks of."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st
from support.mutations import damaged

from kvtcd.core import archive
from kvtcd.core.archive_messages import Block, Kind, Namespace, ProfileHead, decode, encode
from kvtcd.core.errors import BadChecksum, BadField, BadMagic, BadVersion, Corrupt, Truncated
from kvtcd.core.identity import Identity

HERE = Path(__file__).parent / "golden"
GOLDEN = (HERE / "export-v1.bin").read_bytes()
BLOB = (HERE / "blob-v1.bin").read_bytes()
IDENTITY = Identity.from_json(json.loads((HERE / "identities-v1.json").read_text())["kv"]["identity"])
KEY, SALT = bytes(range(32)), bytes(range(32, 64))
HEADER, PREFIX = 72, 5
PROFILE = b"a profile in two parts"
FIRST = Namespace("docs", "uid:1000", IDENTITY)
ROOT = Block(
    b"\x01" * 32, b"", None, None, 200, IDENTITY.layout.nbytes(200), 1_790_000_000_000, None, memoryview(BLOB)
)
CHILD = Block(
    b"\x02", b"salt", b"\x01" * 32, 512, 200, ROOT.raw_bytes, 1_790_000_000_001, 1_800_000_000_000,
    memoryview(BLOB),
)  # fmt: skip
HEAD = ProfileHead(hashlib.sha256(PROFILE).digest(), len(PROFILE))


def written(*messages, key=KEY, salt=SALT, end=True) -> bytes:
    out = io.BytesIO()
    writer = archive.Writer(key, salt, out.write)
    for message in messages:
        writer.put(message)
    if end:
        writer.end()
    return out.getvalue()


def read(data: bytes, key: bytes = KEY) -> list:
    return list(archive.read(key, io.BytesIO(data).read))


def frames(data: bytes) -> list[bytes]:
    """Cut a file into its frames."""
    found, at = [], HEADER
    while at < len(data):
        end = at + PREFIX + struct.unpack_from("<I", data, at)[0]
        found.append(data[at:end])
        at = end
    return found


def test_a_golden_export_says_what_was_written_then() -> None:
    assert read(GOLDEN) == [FIRST, ROOT, CHILD, HEAD, PROFILE[:10], PROFILE[10:]]
    assert written(FIRST, ROOT, CHILD, HEAD, PROFILE[:10], PROFILE[10:]) == GOLDEN


def test_a_golden_export_opens_with_a_library_of_others_alone() -> None:
    def derived(info: bytes) -> bytes:
        return HKDF(hashes.SHA256(), 32, SALT, info).derive(KEY)

    magic, version, salt, check = struct.unpack("<4sH2x32s32s", GOLDEN[:HEADER])
    assert (magic, version, salt, check) == (b"KVTX", 1, SALT, derived(b"kvtcd-export-check-v1"))
    cipher = AESGCM(derived(b"kvtcd-export-aes-v1"))
    contents = [
        (frame[4], cipher.decrypt(number.to_bytes(12, "big"), frame[5:], frame[:5]))
        for number, frame in enumerate(frames(GOLDEN))
    ]
    assert [kind for kind, _ in contents] == [0, 1, 1, 2, 3, 3, 4]
    assert json.loads(contents[0][1]) == {
        "identity": IDENTITY.to_json(), "name": "docs", "tenant": "uid:1000",
    }  # fmt: skip
    assert contents[2][1].endswith(b"\x02" + b"\x01" * 32 + b"salt" + BLOB)
    assert contents[4][1] + contents[5][1] == PROFILE


def test_every_flipped_bit_is_found() -> None:
    small = written(FIRST, HEAD, PROFILE)
    for bit in range(8 * len(small)):
        damaged = bytearray(small)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            read(bytes(damaged))


def test_every_cut_is_found_even_between_frames() -> None:
    small = written(FIRST, HEAD, PROFILE)
    for length in range(len(small)):
        with pytest.raises(Truncated):
            read(small[:length])


def test_frames_that_were_moved_repeated_left_out_or_added_are_found() -> None:
    header, parts = GOLDEN[:HEADER], frames(GOLDEN)
    swapped = [parts[0], parts[2], parts[1], *parts[3:]]
    repeated = [parts[0], parts[1], parts[1], *parts[2:]]
    for changed in (swapped, repeated, parts[:1] + parts[2:], parts[1:], [*parts, parts[-1]]):
        with pytest.raises((BadChecksum, BadField)):
            read(header + b"".join(changed))
    with pytest.raises(BadField, match="something follows its end"):
        read(GOLDEN + b"\0")


def test_a_frame_of_another_file_under_the_same_key_is_found() -> None:
    other = written(FIRST, CHILD, CHILD, salt=bytes(32))
    mixed = GOLDEN[:HEADER] + b"".join([*frames(GOLDEN)[:1], frames(other)[1], *frames(GOLDEN)[2:]])
    with pytest.raises(BadChecksum, match="frame 1 was changed, or belongs elsewhere"):
        read(mixed)
    with pytest.raises(BadChecksum, match="not the key"):
        read(other[:8] + SALT + other[40:])


def test_another_key_and_another_file_are_told_apart() -> None:
    with pytest.raises(BadChecksum, match="not the key that it was written with"):
        read(GOLDEN, bytes(32))
    with pytest.raises(BadMagic, match="no file of `kvtcd export`"):
        read(b"PK\3\4" + GOLDEN[4:])
    with pytest.raises(BadVersion, match="version 2; this release reads 1"):
        read(GOLDEN[:4] + b"\2\0" + GOLDEN[6:])


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([ROOT], "BLOCK behind the header"),
        ([FIRST, FIRST], "NAMESPACE behind NAMESPACE"),
        ([FIRST, PROFILE], "PART behind NAMESPACE"),
        ([FIRST, HEAD, PROFILE, ROOT], "BLOCK behind PART"),
        ([FIRST, HEAD], "END behind PROFILE"),
        ([FIRST, HEAD, PROFILE[:10]], "lacks 12 bytes"),
        ([FIRST, HEAD, PROFILE + b"!"], "no part of its profile"),
        ([FIRST, HEAD, b""], "no part of its profile"),
        ([FIRST, HEAD, PROFILE[::-1]], "is not 9f6513"),
        ([Namespace("../../etc", "uid:1", IDENTITY)], "no name of a namespace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whoever_has_the_key_still_has_to_keep_to_the_form(messages, why) -> None:
    with pytest.raises(Corrupt, match=why):
        read(written(*messages))


def test_what_comes_before_damage_is_said_and_nothing_behind_it() -> None:
    damaged = bytearray(GOLDEN)
    damaged[HEADER + sum(map(len, frames(GOLDEN)[:2])) + PREFIX] ^= 1
    messages = archive.read(KEY, io.BytesIO(damaged).read)
    assert [next(messages), next(messages)] == [FIRST, ROOT]
    with pytest.raises(BadChecksum):
        next(messages)


def test_a_length_that_is_claimed_takes_no_memory() -> None:
    asked = []

    def take(nbytes: int) -> bytes:
        asked.append(nbytes)
        return data.read(nbytes)

    data = io.BytesIO(GOLDEN[:HEADER] + struct.pack("<IB", 2**32 - 1, 0))
    with pytest.raises(BadField, match="4294967295 bytes"):
        list(archive.read(KEY, take))
    assert max(asked) <= HEADER


KEYS = st.binary(min_size=1, max_size=64)
NUMBERS = st.integers(0, 2**63 - 1)
BLOCKS = st.builds(
    Block,
    key=KEYS,
    salt=st.binary(max_size=255),
    parent=st.none() | KEYS,
    first_token=st.none() | NUMBERS,
    tokens=st.integers(1, 2**32 - 1),
    raw_bytes=st.integers(2**32, 2**63 - 1),
    created=NUMBERS,
    expires=st.none() | st.integers(1, 2**63 - 1),
    blob=st.binary(min_size=1, max_size=64).map(memoryview),
)


@given(st.lists(BLOCKS, max_size=4), st.lists(st.binary(min_size=1), max_size=3))
def test_what_is_written_is_read(blocks, profiles) -> None:
    named = [(ProfileHead(hashlib.sha256(each).digest(), len(each)), each) for each in profiles]
    messages = [FIRST, *blocks, *(message for pair in named for message in pair)]
    assert read(written(*messages)) == messages


@given(st.sampled_from(list(Kind)), st.binary(max_size=400))
def test_contents_of_any_bytes_are_read_or_refused(kind, content) -> None:
    try:
        message = decode(kind, content)
    except Corrupt:
        return
    if kind is not Kind.END:
        assert encode(message) == (kind, content)


@given(damaged([GOLDEN]))
def test_a_damaged_file_is_refused_and_what_comes_before_is_what_was_written(data) -> None:
    found = []
    try:
        for message in archive.read(KEY, io.BytesIO(data).read):
            found.append(message)  # noqa: PERF402 - it may end in an error, and what came before counts
    except Corrupt:
        assert found == read(GOLDEN)[: len(found)]
        return

    assert data == GOLDEN


@given(st.binary(max_size=300))
def test_files_of_any_bytes_are_refused(data) -> None:
    for start in (b"", GOLDEN[:HEADER], GOLDEN[: HEADER + PREFIX]):
        with pytest.raises(Corrupt):
            read(start + data)
