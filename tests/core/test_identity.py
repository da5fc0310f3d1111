"""Identities: what is hashed, what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtcd.core.errors import BadIdentity, UnsupportedRope
from kvtcd.core.identity import Identity, Rope, RopeKind, differing
from kvtcd.core.layout import Dtype, kv_layout

GOLDEN = json.loads((Path(__file__).parent / "golden" / "identities-v1.json").read_text())
PLAIN = Identity(
    engine="e",
    hash_scheme="h",
    model="m",
    weights="0" * 64,
    layout=kv_layout(layers=2, kv_heads=1, head_dim=8, dtype=Dtype.F32),
    rope=Rope(RopeKind.DEFAULT, 1e4, 8),
)


@pytest.mark.parametrize("name", ["kv", "mla"])
def test_golden_identities_keep_their_digests(name: str) -> None:
    golden = GOLDEN[name]
    identity = Identity.from_json(golden["identity"])
    canonical = json.dumps(golden["identity"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    assert identity.to_json() == golden["identity"]
    assert identity.digest.hex() == golden["digest"] == hashlib.sha256(canonical.encode()).hexdigest()
    assert identity.layout.digest.hex() == golden["layout"]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "1" * 64},
        {"adapter": "1" * 64},
        {"engine": "x"},
        {"model": "x"},
        {"scales": "x"},
        {"block_tokens": 128},
        {"page_format": "x"},
        {"parallel": "x"},
        {"hash_scheme": "x"},
        {"rope": Rope(RopeKind.DEFAULT, 1e5, 8)},
        {"rope": Rope(RopeKind.DEFAULT, 1e4, 4)},
        {"layout": kv_layout(layers=2, kv_heads=1, head_dim=8, dtype=Dtype.BF16)},
        {"layout": kv_layout(layers=3, kv_heads=1, head_dim=8, dtype=Dtype.F32)},
    ],
)
def test_every_field_makes_another_identity(change) -> None:
    other = replace(PLAIN, **change)

    assert other.digest != PLAIN.digest
    assert differing(PLAIN, other) == tuple(change)
    assert Identity.from_json(other.to_json()) == other


def _changed(path: str, value: object) -> dict:
    body = json.loads(json.dumps(PLAIN.to_json()))
    *parents, last = path.split(".")
    target = body
    for part in parents:
        target = target[part] if not isinstance(target, list) else target[int(part)]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return body


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("engine", None, "engine"),
        ("engine", "", "engine"),
        ("engine", 3, "engine"),
        ("engine", "a\n", "engine"),
        ("weights", "0" * 63, "weights"),
        ("weights", "G" * 64, "weights"),
        ("adapter", "lora", "adapter"),
        ("block_tokens", 0, "block_tokens"),
        ("block_tokens", True, "block_tokens"),
        ("block_tokens", 1 << 17, "block_tokens"),
        ("surprise", 1, "surprise"),
        ("layout.dtype", "int8", "layout.dtype"),
        ("layout.layers", 0, "layout.layers"),
        ("layout.layers", 1 << 40, "layout.layers"),
        ("layout.streams", [], "layout.streams"),
        ("layout.streams.0.heads", 0, "layout.streams.heads"),
        ("layout.streams.0.name", "k k", "layout.streams.name"),
        ("layout.streams.0.name", "v", "streams"),
        ("layout.streams.0.rope", 2, "layout.streams.rope"),
        ("rope.theta", 10000, "rope.theta"),
        ("rope.theta", "nan", "rope.theta"),
        ("rope.theta", "ten", "rope.theta"),
        ("rope.theta", None, "rope.theta"),
        ("rope.factor", "2.0", "rope.factor"),
        ("rope.rotary_dim", 7, "rope.rotary_dim"),
        ("rope.rotary_dim", 16, "rope.rotary_dim"),
        ("rope.pairing", "thirds", "rope.pairing"),
        ("rope.kind", "linear", "rope.factor"),
        ("rope", None, "rope"),
        ("layout", 3, "layout"),
    ],
)
def test_a_wrong_identity_names_its_field(path, value, field) -> None:
    with pytest.raises(BadIdentity) as error:
        Identity.from_json(_changed(path, value))

    assert error.value.field == field


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "mrope", ""])
def test_a_rope_that_cannot_be_undone_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedRope, match="stored losslessly"):
        Rope.from_json({"kind": kind, "theta": "1.0", "rotary_dim": 8})


def test_an_identity_without_rotated_streams_needs_no_rope() -> None:
    body = _changed("layout.streams.0.rope", 0)
    body["rope"] = None

    assert Identity.from_json(body).rope is None
