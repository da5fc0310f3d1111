"""Envelopes of a million records read at once: the rules of `core.record`, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtcd.core import record as records
from kvtcd.core.cipher import NONCE_BYTES, TAG_BYTES
from kvtcd.core.events import Found
from kvtcd.core.keys import MAX_KEY, MAX_SALT
from kvtcd.engine.namespaces import Namespace

Rows = npt.NDArray[np.void]
"""Records to be taken in, of type `ROW`."""
Mask = npt.NDArray[np.bool_]

_CODES = {"B": "u1", "H": "<u2", "I": "<u4", "Q": "<u8"}
_ENVELOPE = np.dtype([(name, _CODES.get(code, f"V{code[:-1]}")) for name, code in records.FIELDS])
_FLAGS = records.HAS_PARENT | records.HAS_FIRST
ROW = np.dtype(
    [("key", "V32"), ("parent", "V32"), ("has_parent", "?")]
    + [(name, "<i8") for name in ("created", "namespace", "tokens", "raw_bytes", "nbytes", "first", "ttl")]
)
_NEVER = -1


def read(
    keys: Sequence[bytes], envelopes: Sequence[bytes], footprints: npt.NDArray[np.int64],
    known: Mapping[bytes, Namespace], now: int,
) -> tuple[Rows, Mask]:  # fmt: skip
    """Return a row for each envelope, and which of them are to be taken in.

    These are well-formed, of a known namespace, and have not expired. Why the others are not, those are to be
    asked one by one.

    Args:
        keys: record keys.
        envelopes: stored under them.
        footprints: of the records.
        known: the tenant's namespaces, by digest.
        now: Unix milliseconds.
    """
    heads = [envelope[: records.FIXED_BYTES].ljust(records.FIXED_BYTES, b"\0") for envelope in envelopes]
    given = np.frombuffer(b"".join(heads), _ENVELOPE)
    numbers = np.zeros(len(keys), np.int64)
    for digest, namespace in known.items():
        own = _are(given["namespace"], digest) & (given["generation"] == namespace.generation)
        numbers[own] = namespace.number
    expires, created = given["expires"].astype(np.int64), given["created"].astype(np.int64)
    left, whole = (expires - now) // 1000, (expires - created) // 1000
    rows = np.zeros(len(keys), ROW)
    rows["key"] = np.frombuffer(b"".join(keys), "V32")
    rows["parent"], rows["has_parent"] = given["parent"], given["flags"] & records.HAS_PARENT
    rows["first"] = np.where(given["flags"] & records.HAS_FIRST, given["first_token"], 0)
    for name in ("created", "tokens", "raw_bytes"):
        rows[name] = given[name]
    rows["namespace"], rows["nbytes"] = numbers, footprints
    # A clock that was set back gives nobody more time than he had.
    rows["ttl"] = np.where(given["expires"] == 0, _NEVER, np.where(whole > 0, np.minimum(left, whole), left))
    lengths = np.fromiter(map(len, envelopes), np.int64, len(envelopes))
    alive = (given["expires"] == 0) | (left > 0)
    return rows, _well_formed(given, lengths) & (numbers > 0) & alive


def _well_formed(given: Rows, lengths: npt.NDArray[np.int64]) -> Mask:
    """Apply the rules of `core.record.parse`."""
    key_bytes, salt_bytes = given["key_bytes"].astype(np.int64), given["salt_bytes"].astype(np.int64)
    numbers = [given[name] for name in ("first_token", "raw_bytes", "blob_bytes", "created", "expires")]
    rules: list[Mask] = [
        _are(given["magic"], records.MAGIC),
        given["version"] == records.VERSION,
        _sealed_as_known(given),
        (key_bytes >= 1) & (key_bytes <= MAX_KEY) & (salt_bytes <= MAX_SALT),
        (given["zero"] == 0) & (given["flags"] <= _FLAGS),
        lengths == records.FIXED_BYTES + key_bytes + salt_bytes + records.MAC_BYTES,
        (given["tokens"] >= 1) & (given["tokens"] <= given["raw_bytes"]) & (given["blob_bytes"] > 0),
        np.all([number <= records.MAX_NUMBER for number in numbers], axis=0),
    ]
    together: Mask = np.all(rules, axis=0)
    return together


def _sealed_as_known(given: Rows) -> Mask:
    """Apply the rules of ciphers and their nonces."""
    nonce = np.ascontiguousarray(given["nonce"]).view("u1").reshape(-1, 24)
    plain = (given["cipher"] == records.PLAINTEXT) & ~nonce.any(axis=1)
    one = nonce[:, :NONCE_BYTES].any(axis=1) & ~nonce[:, NONCE_BYTES:].any(axis=1)
    secret = (given["cipher"] == records.AES_256_GCM) & (given["blob_bytes"] > TAG_BYTES)
    known: Mask = plain | (secret & one)
    return known


def _are(column: npt.NDArray[np.void], value: bytes) -> Mask:
    """Tell of each item whether its bytes are these."""
    width = len(value)
    given = np.ascontiguousarray(column).view("u1").reshape(-1, width)
    same: Mask = (given == np.frombuffer(value, "u1")).all(axis=1)
    return same


def found(rows: Rows) -> tuple[Found, ...]:
    """Return what rows say."""
    continues, ttl = rows["has_parent"].tolist(), rows["ttl"].tolist()
    columns = (rows[name].tolist() for name in ("key", "namespace", "tokens", "raw_bytes", "nbytes"))
    parents = [key if there else None for key, there in zip(rows["parent"].tolist(), continues, strict=True)]
    left = [None if seconds == _NEVER else seconds for seconds in ttl]
    return tuple(map(Found._make, zip(*columns, parents, rows["first"].tolist(), left, strict=True)))
