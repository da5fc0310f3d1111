"""The twin that the other tests use has the names, fields and parameters of the real thing."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum
from importlib import import_module

import pytest
from support import vllm_twin as twin

pytestmark = [
    pytest.mark.peers("vllm"),
    pytest.mark.filterwarnings("ignore"),  # what vLLM says while it is imported is not about us
]

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
    elif dataclasses.is_dataclass(ours) and dataclasses.is_dataclass(theirs):
        fields = {field.name for field in dataclasses.fields(theirs)}
        assert {field.name for field in dataclasses.fields(ours)} <= fields | OURS
    else:
        for method, function in vars(ours).items():
            plain = getattr(function, "__func__", function)  # of a class method
            if inspect.isfunction(plain) and (method == "__init__" or not method.startswith("_")):
                wanted = list(inspect.signature(plain).parameters)
                real = getattr(theirs, method)
                real = getattr(real, "__func__", real)
                if method != "__init__" or not dataclasses.is_dataclass(theirs):
                    assert list(inspect.signature(real).parameters) == wanted, method


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


def test_the_connector_is_a_whole_one() -> None:
    from kvtcd.integrations.vllm_connector import KvtcdConnector  # noqa: PLC0415 - imports vLLM

    theirs = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    assert issubclass(KvtcdConnector, theirs)
    assert not KvtcdConnector.__abstractmethods__
    for name, ours in vars(KvtcdConnector).items():
        real = getattr(theirs, name, None)
        if inspect.isfunction(ours) and inspect.isfunction(real):
            wanted = list(inspect.signature(real).parameters)
            assert list(inspect.signature(ours).parameters) == wanted, name
