"""Pages of stand-in pools on a daemon that is a real process."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.patience import PATIENCE_S
from support.sglang_twin import PAGE, MHATokenToKVPoolHost, OtherPoolHost

from kvtcd.integrations.link import Link
from kvtcd.integrations.sglang_identity import Model, Parameters, Ranks
from kvtcd.integrations.sglang_pools import KV, Pools
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger("kvtcd.test")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with Daemon(folder, host=64 << 20, disk=256 << 20, profiles=folder / "profiles") as daemon:
        yield daemon


@pytest.fixture
def pools(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Pools]:
    weights = request.node.name.encode().hex()[:64].ljust(64, "0")  # each test has a model of its own
    model = Model(name="m", weights=weights, settings="s", adapter="none", layers=None, rope=None)
    ranks = Ranks(tp=(0, 1), pp=(0, 1), cp=(0, 1), dcp=(0, 1), replicated=False)
    with daemon.client() as client:
        link = Link(client, LOG, seconds=PATIENCE_S)
        yield Pools(
            link, Parameters(timeout_seconds=PATIENCE_S), ranks, model, writes=True, version="1", log=LOG
        )


def keys(count: int) -> list[str]:
    return [f"{number:02x}" * 32 for number in range(1, count + 1)]


def at(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.mark.parametrize("cls", [MHATokenToKVPoolHost, OtherPoolHost])
def test_pages_go_and_come(pools: Pools, cls: type[MHATokenToKVPoolHost]) -> None:
    source = cls("page_head")
    wanted = source.kv_buffer.clone()
    pools.register(KV, source)
    assert pools.prefix(KV, keys(3)) == 0
    assert pools.put(KV, keys(3), at(0, 1, 2), before=[]) == [True] * 3
    assert pools.put(KV, keys(3), at(0, 1, 2), before=[]) == [True] * 3  # they are there
    assert pools.present(KV, [keys(4)[3], *keys(1)]) == [False, True]
    source.kv_buffer.zero_()
    assert pools.fetch(KV, keys(4), at(0, 1, 2, 3)) == [True] * 3 + [False]
    assert torch.equal(source.kv_buffer[:, :3], wanted[:, :3])
    assert not source.kv_buffer[:, 3:].any()
    flat = pools.fetch_flat(keys(1), None)[0]
    assert flat is not None
    assert torch.equal(flat, source.get_data_page(0))
    pools.clear()
    assert pools.prefix(KV, keys(3)) == 0
    assert pools.put_flat(keys(1), [flat]) == [True]


def test_clearing_what_an_operator_has_purged_is_no_outage(
    daemon: Daemon, pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    pools.register(KV, MHATokenToKVPoolHost("page_head"))
    assert pools.put(KV, keys(2), at(0, 1), before=[]) == [True] * 2
    with daemon.client() as client:
        for info in client.namespaces():
            client.purge(info.name)
    pools.clear()
    assert "can be used again" not in caplog.text
    assert pools.put(KV, keys(2), at(0, 1), before=[]) == [True] * 2


def test_more_pages_than_fit_the_memory_that_is_shared(pools: Pools) -> None:
    source = MHATokenToKVPoolHost("layer_first")
    wanted = source.kv_buffer.clone()
    pools.register(KV, source)
    many, places = keys(40), at(*[number % 6 for number in range(40)])
    assert pools.put(KV, many, places, before=None) == [True] * 40
    source.kv_buffer.zero_()
    assert pools.fetch(KV, many, places) == [True] * 40
    assert torch.equal(source.kv_buffer, wanted)


def test_what_is_not_registered_or_does_not_fit_is_a_miss(pools: Pools) -> None:
    assert pools.prefix(KV, keys(1)) == 0
    assert pools.put(KV, keys(1), at(0), None) == [False]
    assert pools.fetch_flat(keys(2), None) == [None, None]
    pools.register(KV, MHATokenToKVPoolHost("page_first"))
    assert pools.put(KV, keys(2), at(0), None) == [False, False]  # fewer places than keys
    assert pools.put(KV, keys(2), None, None) == [False, False]
    mixed = [*keys(1), "short", keys(2)[1]]
    assert pools.put(KV, mixed, at(0, 1, 2), None) == [True, False, False]
