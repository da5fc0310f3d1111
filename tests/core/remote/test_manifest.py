"""The manifest of a profile: what is written is read, and what is not one is refused."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.errors import BadChecksum, BadField, BadMagic, BadVersion, Corrupt, Truncated
from kvtcd.core.remote import names
from kvtcd.core.remote.manifest import PART_BYTES, Manifest, count_of, require_header

GOLDEN = Path(__file__).parent / "golden" / "profile-1.manifest"
PROFILE = b"".join(bytes([number]) * 1000 for number in range(3)) + b"end"
"""What the golden manifest is of, in parts of 1,000 bytes."""


def test_golden() -> None:
    """Written by hand from the words of the format, not by the code."""
    parts = [PROFILE[at : at + 1000] for at in range(0, len(PROFILE), 1000)]
    body = b"KVTP" + (1).to_bytes(4, "little") + (1000).to_bytes(4, "little") + (3003).to_bytes(8, "little")
    body += b"".join(hashlib.sha256(part).digest() for part in parts)
    manifest = Manifest.from_bytes(GOLDEN.read_bytes())

    assert GOLDEN.read_bytes() == body + hashlib.sha256(body).digest()
    assert manifest == Manifest(3003, tuple(hashlib.sha256(part).digest() for part in parts), 1000)
    assert manifest.to_bytes() == GOLDEN.read_bytes()
    assert [manifest.bounds(n) for n in range(4)] == [(0, 1000), (1000, 1000), (2000, 1000), (3000, 3)]
    assert names.part_name(manifest.digests[3]) == f"profiles/parts/{hashlib.sha256(b'end').hexdigest()}"


@given(st.integers(1, 5000), st.integers(1, 300))
def test_bounds_cover_a_profile_once_and_it_is_read_back(size: int, part: int) -> None:
    count = count_of(size, part)
    manifest = Manifest(size, tuple(n.to_bytes(32, "big") for n in range(count)), part)
    covered = [at for n in range(count) for at in range(sum(manifest.bounds(n)))[manifest.bounds(n)[0] :]]

    assert covered == [*range(size)]
    assert Manifest.from_bytes(memoryview(manifest.to_bytes())) == manifest


@given(st.data())
def test_no_byte_of_it_may_be_another(data) -> None:
    whole = bytearray(Manifest(3 * PART_BYTES - 1, (b"1" * 32, b"2" * 32, b"3" * 32)).to_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        Manifest.from_bytes(whole)


def sealed(part: int, size: int, digests: bytes, version: int = 1) -> bytes:
    body = struct.pack("<4sIIQ", b"KVTP", version, part, size) + digests
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", BadMagic),
        (b"\0", BadMagic),
        (b"KVTP" + bytes(20), Truncated),
        (sealed(1000, 10, b"1" * 32, version=2), BadVersion),
        (GOLDEN.read_bytes()[:-1] + b"?", BadChecksum),
        (GOLDEN.read_bytes()[:-32], BadChecksum),
        (sealed(0, 10, b"1" * 32), BadField),
        (sealed(1000, 0, b""), BadField),
        (sealed(17 << 20, 10, b"1" * 32), BadField),
        (sealed(1000, 1 << 60, b"1" * 32), BadField),
        (sealed(1000, 10, b"1" * 33), BadField),
        (sealed(1000, 10, b"1" * 64), BadField),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, error: type[Corrupt]) -> None:
    with pytest.raises(Corrupt) as told:
        Manifest.from_bytes(data)

    assert type(told.value) is error


@given(st.integers(0, (1 << 64) - 1))
def test_what_begins_as_a_profile_is_told_from_what_does_not(length: int) -> None:
    data = length.to_bytes(8, "little") + b"{"
    if 0 < length <= 1 << 20:
        require_header(data)
    else:
        with pytest.raises(BadMagic):
            require_header(data)


def test_a_manifest_is_no_profile_as_it_was_put_before_and_the_other_way_round() -> None:
    with pytest.raises(BadMagic):
        require_header(GOLDEN.read_bytes())
    with pytest.raises(Truncated):
        require_header(b"KVTP")
    for profile in (Path(__file__).parents[2] / "codec" / "golden").glob("*.safetensors"):
        require_header(profile.read_bytes())
        with pytest.raises(BadMagic):
            Manifest.from_bytes(profile.read_bytes())
