"""Writes the golden files of this folder. Run once per format version; never to make a test pass."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from pathlib import Path

from kvtcd.core import archive, blob, cipher, record
from kvtcd.core.archive_messages import Block, Namespace, ProfileHead
from kvtcd.core.identity import Identity, Pairing, Rope, RopeKind
from kvtcd.core.keys import EngineKey, TenantKeys, chain
from kvtcd.core.layout import Dtype, Layout, Stream, kv_layout

HERE = Path(__file__).parent

KV = Identity(
    engine="transformers",
    hash_scheme="kvtcd-chain-v1",
    model="example/kv-1b",
    weights="0f" * 32,
    layout=kv_layout(layers=3, kv_heads=2, head_dim=8, dtype=Dtype.BF16),
    rope=Rope(
        RopeKind.LLAMA3,
        500_000.0,
        8,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    ),
)
MLA = Identity(
    engine="vllm",
    hash_scheme="vllm-sha256-cbor",
    model="example/mla-1b",
    weights="a5" * 32,
    adapter="5a" * 32,
    layout=Layout((Stream("latent", 1, 64, rope=False), Stream("k_pe", 1, 16, rope=True)), 2, Dtype.F16),
    rope=Rope(
        RopeKind.YARN,
        10_000.0,
        16,
        Pairing.NEIGHBOURS,
        factor=40.0,
        original_max_position=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=1.5,
    ),
    block_tokens=64,
    page_format="vllm-mla",
    parallel="tp2-rank0",
)
MASTER = bytes(range(32))
NONCE = bytes(range(100, 112))
TOKENS = [5, 0, 4_294_967_295, 17, 17, 3, 9]


def identities() -> dict[str, object]:
    return {
        name: {
            "identity": identity.to_json(),
            "digest": identity.digest.hex(),
            "layout": identity.layout.digest.hex(),
        }
        for name, identity in (("kv", KV), ("mla", MLA))
    }


def keys() -> dict[str, object]:
    tenant = TenantKeys.derive(MASTER, "uid:1000")
    links = list(chain(KV.digest, TOKENS, 3))
    return {
        "chain": [link.key.hex() for link in links],
        "key_id": tenant.key_id.hex(),
        "record": tenant.record.hex(),
        "mac": tenant.mac.hex(),
        "cipher": tenant.cipher.hex(),
        "tag": tenant.tag.hex(),
        "record_keys": [tenant.record_key(KV.digest, salt, links[0].key).hex() for salt in (b"", b"salt")],
    }


def blob_bytes() -> bytes:
    tokens = 200
    plane = bytes(range(256)) * 75
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(plane[: blob.CHUNK_BYTES]) + packer.flush()
    header = blob.Header(
        blob.CodecId.KVTC,
        1,
        Dtype.BF16,
        KV.layout.digest,
        tokens,
        KV.layout.nbytes(tokens),
        first_token=512,
        basis=blob.BasisId.PLAIN,
        plan=16,
        profile=b"p" * 32,
    )
    return bytes(
        blob.assemble(
            header,
            [
                blob.Run(
                    blob.Kind.CODES,
                    0,
                    4,
                    0,
                    72,
                    len(plane),
                    [
                        blob.Chunk(first, stored=False),
                        blob.Chunk(plane[blob.CHUNK_BYTES :], stored=True),
                    ],
                ),
                blob.Run(blob.Kind.RAW, blob.ALL_STREAMS, 0, 72, 128, 100, data=b"r" * 100),
            ],
        )
    )


def encrypted(content: bytes) -> bytes:
    tenant = TenantKeys.derive(MASTER, "uid:1000")
    key = tenant.record_key(KV.digest, b"salt", list(chain(KV.digest, TOKENS, 3))[1].key)
    return bytes(cipher.encrypt(tenant, key, NONCE, memoryview(content)))


def envelope_bytes(content: bytes, nonce: bytes = b"") -> bytes:
    tenant = TenantKeys.derive(MASTER, "uid:1000")
    links = list(chain(KV.digest, TOKENS, 3))
    key = tenant.record_key(KV.digest, b"salt", links[1].key)
    return record.seal(
        tenant,
        record.Envelope(
            key=key,
            tenant_tag=tenant.tag,
            key_id=tenant.key_id,
            namespace=KV.digest,
            generation=7,
            engine_key=links[1].key,
            salt=b"salt",
            parent=tenant.record_key(KV.digest, b"salt", links[0].key),
            first_token=512,
            tokens=200,
            raw_bytes=KV.layout.nbytes(200),
            blob_bytes=len(content),
            created=1_790_000_000_000,
            expires=None,
            blob_mac=record.blob_mac(tenant, content),
            nonce=nonce,
        ),
    )


def export_bytes() -> bytes:
    """Return an export of two blocks and a profile."""
    content, raw_bytes, profile = memoryview(blob_bytes()), KV.layout.nbytes(200), b"a profile in two parts"
    root = EngineKey(b"\x01" * 32)
    out = io.BytesIO()
    writer = archive.Writer(MASTER, bytes(range(32, 64)), out.write)
    writer.put(Namespace("docs", "uid:1000", KV))
    writer.put(Block(root, b"", None, None, 200, raw_bytes, 1_790_000_000_000, None, content))
    writer.put(
        Block(
            EngineKey(b"\x02"), b"salt", root, 512, 200, raw_bytes,
            1_790_000_000_001, 1_800_000_000_000, content,
        )
    )  # fmt: skip
    writer.put(ProfileHead(hashlib.sha256(profile).digest(), len(profile)))
    writer.put(profile[:10])
    writer.put(profile[10:])
    writer.end()
    return out.getvalue()


if __name__ == "__main__":
    (HERE / "identities-v1.json").write_text(json.dumps(identities(), indent=1, sort_keys=True) + "\n")
    (HERE / "keys-v1.json").write_text(json.dumps(keys(), indent=1) + "\n")
    (HERE / "blob-v1.bin").write_bytes(blob_bytes())
    (HERE / "envelope-v1.bin").write_bytes(envelope_bytes(blob_bytes()))
    (HERE / "blob-v1-aes.bin").write_bytes(encrypted(blob_bytes()))
    (HERE / "envelope-v1-aes.bin").write_bytes(envelope_bytes(encrypted(blob_bytes()), NONCE))
    (HERE / "export-v1.bin").write_bytes(export_bytes())
