"""Records that prove their own bytes: the envelope holds a digest of key, version, filler and blob."""

from __future__ import annotations

import blake3
import numpy as np
import numpy.typing as npt

from kvtcd.tiers.disk import Put

_DIGEST = 32
_VERSION = 8


def key_of(index: int) -> bytes:
    """Return the record key of the `index`-th record of a test."""
    return blake3.blake3(b"key %d" % index).digest()


def seal(key: bytes, version: int, blob_bytes: int) -> Put:
    """Return a record whose content follows from key, version and length."""
    source = blake3.blake3(key + version.to_bytes(_VERSION, "little") + blob_bytes.to_bytes(8, "little"))
    filler_bytes = 100 + int.from_bytes(source.digest(length=2)) % 3000
    content = source.digest(length=filler_bytes + blob_bytes)
    covered = version.to_bytes(_VERSION, "little") + content[:filler_bytes]
    blob = content[filler_bytes:]
    return Put(key, _digest(key, covered, blob) + covered, blob)


def version_of(key: bytes, envelope: bytes, blob: npt.NDArray[np.uint8]) -> int | None:
    """Return the version of a record whose bytes are all right, else None: what a MAC does in earnest."""
    digest, covered = envelope[:_DIGEST], envelope[_DIGEST:]
    if digest != _digest(key, covered, blob.tobytes()):
        return None
    return int.from_bytes(covered[:_VERSION], "little")


def _digest(key: bytes, covered: bytes, blob: bytes) -> bytes:
    return blake3.blake3(key + len(covered).to_bytes(4, "little") + covered + blob).digest()
