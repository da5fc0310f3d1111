"""What is wrong with an engine's JSON is named, with what it has to be, in one way for every engine."""

from __future__ import annotations

import pytest

from kvtcd.core.errors import BadRequest
from kvtcd.integrations.lmcache_models import Parameters as LMCache
from kvtcd.integrations.options import read
from kvtcd.integrations.sglang_identity import Parameters as SGLang
from kvtcd.integrations.vllm_staging import slots_in
from kvtcd.integrations.vllm_steps import Options, TierOptions

KINDS = {
    "connector": lambda given: read(Options, given),
    "tier": lambda given: read(TierOptions, given),
    "LMCache": LMCache.of,
    "SGLang": SGLang.of,
}
WRONG = [
    ("timeout_seconds", 0), ("timeout_seconds", -1), ("timeout_seconds", "5"), ("timeout_seconds", True),
    ("timeout_seconds", float("nan")), ("timeout_seconds", float("inf")), ("timeout_seconds", None),
    ("full_digest", "true"), ("full_digest", 1), ("salt", 3), ("variant", None), ("socket", 7),
    ("sockets", "/run/kvtcd.sock"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_cannot_be_meant_is_refused_by_name(kind: str, name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"^{name}: is ") as refused:
        KINDS[kind]({name: value})
    assert "it has to be" in refused.value.why or "did you mean socket?" in refused.value.why


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("connector", "chunk_tokens", "64"),
        ("connector", "chunk_tokens", 0),
        ("connector", "chunk_tokens", 64.0),
        ("connector", "buffer_bytes", "2 GiB"),
        ("connector", "retry_seconds", 0),
        ("connector", "adapters", "/models/adapter"),
        ("tier", "retry_seconds", "2"),
        ("tier", "adapters", [1]),
        ("tier", "chunk_tokens", 64),
        ("LMCache", "models", ["/models/a"]),
        ("LMCache", "lookup_seconds", 0),
        ("LMCache", "short_hashes", "no"),
        ("SGLang", "adapters", "/models/adapter"),
    ],
)
def test_what_one_engine_alone_has_is_refused_alike(kind: str, name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"^{name}: is "):
        KINDS[kind]({name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_meant_is_taken(kind: str) -> None:
    taken = KINDS[kind]({"socket": None, "timeout_seconds": 3, "full_digest": True, "salt": "ann"})
    assert (taken.timeout_seconds, taken.full_digest, taken.salt) == (3, True, "ann")


def test_sglangs_own_keys_are_its_own() -> None:
    given = {"backend_name": "kvtcd", "interface_v1": 1, "hicache_storage_pass_prefix_keys": True}
    assert SGLang.of(given | {"adapters": ["/a"], "prefetch_timeout_base": 1}).adapters == ("/a",)


def test_memory_for_less_than_a_few_chunks_is_refused() -> None:
    assert slots_in(4096, 1024) == 4
    with pytest.raises(
        BadRequest, match=r"buffer_bytes: .* hold 3 chunks of 1,024 bytes; give at least 4096"
    ):
        slots_in(4095, 1024)
