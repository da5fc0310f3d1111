"""The twin that the other tests use has the names, fields and parameters of the real thing."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum
from importlib import import_module

import pytest
from support import vllm_twin as twin

pytestmark = pytest.mark.peers("vllm")

PLACES = {
    twin.BASE: [
        "LookupResult", "Medium", "Locality", "OffloadPolicy", "RequestOffloadingContext",
        "OffloadingCounterMetadata", "OffloadingGaugeMetadata", "ReqContext", "OffloadingSpec",
    ],
    twin.TIERING: ["TransferJob", "JobResult", "SecondaryTierManager"],
    twin.CONFIG: [
        "OffloadingGroupConfig", "OffloadingModelConfig", "OffloadingCacheConfig", "OffloadingParallelConfig",
        "OffloadingConfig",
    ],
    twin.METRICS: ["OffloadingConnectorStats"],
}  # fmt: skip
OURS = {"ends"}
"""Fields that only the twin has."""
NAMES = [(place, name) for place, names in PLACES.items() for name in names]


@pytest.mark.parametrize(("place", "name"), NAMES, ids=[name for _, name in NAMES])
def test_the_twin_is_like_the_real_one(place: str, name: str) -> None:
    ours, theirs = getattr(twin, name), getattr(import_module(place), name)

    if issubclass(ours, Enum):
        assert [member.name for member in ours] == [member.name for member in theirs]
    elif dataclasses.is_dataclass(theirs):
        fields = {f.name: f for f in dataclasses.fields(theirs)}
        for field in dataclasses.fields(ours):
            assert field.name in fields or field.name in OURS
    for method, function in vars(ours).items():
        if (inspect.isfunction(function) and not method.startswith("__")) or method == "__init__":
            real = getattr(theirs, method, None)
            assert real is not None, method
            if not dataclasses.is_dataclass(ours):
                assert list(inspect.signature(function).parameters) == _names(real)[: _count(function)], (
                    method
                )


def _names(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _count(function) -> int:
    return len(inspect.signature(function).parameters)


def test_every_abstract_method_is_in_the_twin_too() -> None:
    theirs = import_module(twin.TIERING).SecondaryTierManager

    assert theirs.__abstractmethods__ == twin.SecondaryTierManager.__abstractmethods__


def test_the_tier_is_a_whole_one() -> None:
    from kvtcd.integrations.vllm_tier import KvtcdTier  # noqa: PLC0415 - imports vLLM

    theirs = import_module(twin.TIERING).SecondaryTierManager
    assert issubclass(KvtcdTier, theirs)
    assert not KvtcdTier.__abstractmethods__
    for method in theirs.__abstractmethods__:
        ours = inspect.signature(getattr(KvtcdTier, method))
        assert list(ours.parameters) == list(inspect.signature(getattr(theirs, method)).parameters), method


def test_vllm_says_which_kernels_order_a_page() -> None:
    """The one private name that the tier asks for; without it pages would be opaque, not wrong."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - imports vLLM

    assert list(inspect.signature(_get_attn_isa).parameters)[:3] == ["dtype", "block_size", "head_size"]
