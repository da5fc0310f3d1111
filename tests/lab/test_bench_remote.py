"""The bench of the remote tier measures what it says, and leaves nothing in the store."""

from __future__ import annotations

import pytest
from support import redis_servers
from support.s3_service import BUCKET, s3

from kvtcd import shared_store
from kvtcd.config import Config, Credentials
from kvtcd.lab import bench_remote as lab
from kvtcd.lab.store_libraries import library

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
NONE = Credentials()
KEYS = Credentials.model_validate({"key_id": "k", "secret": "s"})


async def rows(folder, entry: Credentials, **said: str) -> list[lab.Row]:
    config = Config.model_validate({"remote": {"timeout": 60.0, **said}})
    return await lab.measure(
        lambda: shared_store.client(config, entry), lambda: library(config, entry), folder, mib=1, blocks=5,
        rounds=2,
    )  # fmt: skip


def sound(measured: list[lab.Row]) -> None:
    assert [(row.verb, row.mib) for row in measured] == [("put", 1), ("get", 1)]
    speeds = [speed for row in measured for speed in (row.tier, row.library, row.client)]
    assert all(speed.mb_s > 0 and speed.cpu_mb_s > 0 for speed in speeds)


@redis_servers.needed
async def test_of_redis(tmp_path) -> None:
    async with redis_servers.single(tmp_path / "server") as server:
        sound(await rows(tmp_path / "profiles", NONE, url=f"redis://127.0.0.1:{server.port}"))
        assert await server.ask("DBSIZE") == 0


@redis_servers.needed
async def test_of_a_cluster(tmp_path) -> None:
    async with redis_servers.cluster(tmp_path / "servers") as nodes:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        sound(await rows(tmp_path / "profiles", NONE, url=f"redis+cluster://{hosts}"))
        assert [await node.ask("DBSIZE") for node in nodes] == [0, 0, 0]


async def test_of_s3(tmp_path) -> None:
    with s3() as url:
        sound(await rows(tmp_path / "profiles", KEYS, url=f"s3://{BUCKET}/here", endpoint=url))
