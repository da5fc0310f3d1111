"""State directories with any number of small blocks, as a daemon would have left them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from kvtcd.core import blob as blobs
from kvtcd.core import record as records
from kvtcd.core.blob import ALL_STREAMS, CodecId, Header, Kind, Run
from kvtcd.core.identity import Identity, Rope, RopeKind
from kvtcd.core.keys import EngineKey, RecordKey, TenantKeys
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.core.record import Envelope
from kvtcd.engine.namespaces import TENANT_NAME, persisted
from kvtcd.tiers.disk import Environment, Put
from kvtcd.tiers.state import StateDirectory

IDENTITY = Identity(
    engine="bench", hash_scheme="none", model="bench", weights="00" * 32,
    rope=Rope(RopeKind.DEFAULT, 10_000.0, 8), block_tokens=16,
    layout=kv_layout(layers=1, kv_heads=1, head_dim=8, dtype=Dtype.BF16),
)  # fmt: skip
NAME = "bench"
CHAIN = 64
"""Blocks of one sequence."""
QUOTA = 16 << 10
"""Bytes on disk to allow for one of these blocks."""
_GENERATION = 1
_RAW_BYTES = IDENTITY.layout.nbytes(IDENTITY.block_tokens)
_BATCH = 1000
"""Records of one transaction."""


def engine_key(number: int) -> EngineKey:
    """Return the key of a block; block `n` continues block `n - 1`, but for the first of each chain."""
    return EngineKey(hashlib.sha256(b"%d" % number).digest())


def fill(state: Path, blocks: int, written: Callable[[int], None]) -> None:
    """Write a state directory with blocks of this user, and close it cleanly.

    Args:
        state: where; it does not exist yet.
        blocks: how many.
        written: told how many records were written, after each transaction.
    """
    directory = StateDirectory(state)
    tenant = f"uid:{os.getuid()}"
    keys = TenantKeys.derive(directory.master_key(), tenant)
    environment = Environment(directory.tenant(keys.tag.hex()), quota=blocks * QUOTA)
    environment.put_namespace(TENANT_NAME, tenant.encode())
    environment.put_namespace(NAME, persisted(IDENTITY, _GENERATION))
    record_key = keys.record_keys(IDENTITY.digest, b"")
    blob = _blob()
    parent: RecordKey | None = None
    mac, tokens, nbytes = records.blob_mac(keys, blob), IDENTITY.block_tokens, _RAW_BYTES
    for start in range(0, blocks, _BATCH):
        puts = []
        for number in range(start, min(start + _BATCH, blocks)):
            key = record_key(engine_key(number))
            above = parent if number % CHAIN else None
            envelope = Envelope(
                key=key, tenant_tag=keys.tag, key_id=keys.key_id, namespace=IDENTITY.digest,
                generation=_GENERATION, engine_key=engine_key(number), salt=b"", parent=above,
                first_token=number % CHAIN * tokens, tokens=tokens, raw_bytes=nbytes, blob_bytes=len(blob),
                created=1 + number, expires=None, blob_mac=mac,
            )  # fmt: skip
            puts.append(Put(key, records.seal(keys, envelope), blob))
            parent = key
        environment.write(puts, [])
        written(len(puts))
    environment.close()
    directory.close()


def _blob() -> bytearray:
    tokens = IDENTITY.block_tokens
    header = Header(CodecId.RAW, 1, IDENTITY.layout.dtype, IDENTITY.layout.digest, tokens, _RAW_BYTES, 0)
    raw = Run(Kind.RAW, ALL_STREAMS, 0, 0, tokens, _RAW_BYTES, data=bytes(_RAW_BYTES))
    return blobs.assemble(header, [raw])
