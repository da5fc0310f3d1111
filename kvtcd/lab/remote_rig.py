"""A remote tier with a catalog of its own, and what else speaks to the same store, to time all of them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvtcd.codec.choose import codec_for
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.blob import CodecId
from kvtcd.core.catalog import Catalog
from kvtcd.core.errors import RemoteFailed
from kvtcd.core.events import Govern
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey, RecordKey, TenantKeys
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.core.policy import CodecChoice, Policy
from kvtcd.core.remote.ledger import Ledger
from kvtcd.core.remote.names import parts
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings
from kvtcd.engine.driver import Driver
from kvtcd.engine.emptying import forget
from kvtcd.engine.lanes import Lane, on_threads
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.ports import RemoteStore
from kvtcd.engine.remote.arrivals import CALLS, TOGETHER
from kvtcd.engine.remote.build import Settings, remote_tier
from kvtcd.engine.remote.writing import BATCH_BYTES, WRITERS
from kvtcd.engine.steps import Origin, Record, seal
from kvtcd.lab.store_libraries import Library
from kvtcd.tiers.disk import Put, footprint
from kvtcd.tiers.memory import GRANULE, HostMemory

WAYS = "tier", "library", "client"
_TENANT = "bench"
_PATIENCE_S = 600.0
T = TypeVar("T")
_Work = Callable[[], Awaitable[None]]


class Took(NamedTuple):
    """Seconds that passed, and those of this process's CPU."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Packed:
    """A blob that nobody packed."""

    blob: bytearray
    codec: CodecId = CodecId.LOSSLESS
    reason: str | None = None


async def _stay(_: Namespace) -> None:
    """Purge nothing."""


async def _as_before() -> None:
    """Pack as before."""


class Rig:
    """The tier is started, and closed, with it.

    Args:
        store: makes a client as the tier has it: one for the tier, one to be timed alone.
        library: makes the library of the same store as it comes.
        folder: for profiles, of which there are none.
        nbytes: of a record.
        blocks: records of one round.
    """

    def __init__(
        self,
        store: Callable[[], RemoteStore],
        library: Callable[[], Library],
        folder: Path,
        nbytes: int,
        blocks: int,
    ) -> None:
        self._client, self._library, self._nbytes, self._blocks = store(), library(), nbytes, blocks
        layout = Layout(
            (Stream("v", heads=1, head_dim=nbytes // 512, rope=False),), layers=1, dtype=Dtype.BF16
        )
        identity = Identity(
            engine="bench", hash_scheme="none", model=secrets.token_hex(4), weights="00" * 32, layout=layout,
            rope=None, block_tokens=256,
        )  # fmt: skip
        policy, sightings, master = Policy("bench"), Sightings(width=1 << 10), secrets.token_bytes(32)
        memory, metrics, self._registry = HostMemory(4 * blocks * nbytes), Metrics(), Registry()
        catalog = Catalog(
            shelves(policy, sightings, host=memory.capacity, granule=GRANULE), lambda raw: raw, sightings
        )
        memory.slab[:] = 0  # as in a daemon that has run for a while, no page is new
        self._stages = on_threads()
        mover = Mover(
            memory=memory, put_record=Put, stages=self._stages, scratch=HeapScratch, metrics=metrics,
            footprint=footprint,
        )  # fmt: skip
        self._driver = Driver(catalog, memory, mover, self._registry, metrics)
        self._tenant = self._registry.tenants[_TENANT] = Tenant(TenantKeys.derive(master, _TENANT), None)
        profiles = ProfileFolder(folder)
        codec = codec_for(identity, CodecChoice("lossless"), profiles, None)
        self._namespace = self._registry.add(
            _TENANT, "bench", identity, generation=1, policy=policy, codec=codec, lossless=codec
        )
        self._govern(policy)
        self._shelving = Lane("profiles")
        self.tier = remote_tier(
            store(), Settings(timeout=60.0, queue=4 * blocks * nbytes), driver=self._driver, memory=memory,
            registry=self._registry, metrics=metrics, profiles=profiles,
            profile_lane=self._shelving, derive=lambda tenant: TenantKeys.derive(master, tenant),
            ledger=Ledger(), save=lambda _: None,
        )  # fmt: skip

        self.tier.start(_stay, lambda _: None, _as_before)

    def _govern(self, policy: Policy) -> None:
        self._driver.tell(Govern(self._namespace.number, _TENANT, policy, on_disk=False))

    async def round(self, number: int) -> dict[tuple[str, str], Took]:
        """Move new values there and back, each way in its turn; return the seconds by verb and way."""
        records = {RecordKey(key): record for key, record in self._records()}
        values = [b"".join(parts(record.envelope, record.bytes)) for _, record in records.values()]
        once, again = ([f"bench/{secrets.token_hex(16)}" for _ in values] for _ in range(2))
        each = max(1, BATCH_BYTES // self._nbytes)
        ways: dict[str, tuple[_Work, _Work]] = {
            "tier": (lambda: self._offer(records), lambda: self._bring(list(records))),
            "library": (
                lambda: _in_parts([*zip(once, values, strict=True)], self._library.put, each, WRITERS),
                lambda: _in_parts(once, self._library.get, TOGETHER, CALLS),
            ),
            "client": (
                lambda: _in_parts([*zip(again, values, strict=True)], self._put, each, WRITERS),
                lambda: _in_parts(again, self._get, TOGETHER, CALLS),
            ),
        }
        turns = WAYS[number % 3 :] + WAYS[: number % 3]
        taken = {("put", way): await _timed(ways[way][0]) for way in turns}
        taken |= {("get", way): await _timed(ways[way][1]) for way in turns}
        await self.tier.forget(self._namespace, list(records))
        await self._client.delete([*once, *again])
        await forget(self._driver, list(records))
        return taken

    async def close(self) -> None:
        """End the tier, and all connections to the store."""
        await self.tier.close(asyncio.get_running_loop().time() + _PATIENCE_S)
        await self._shelving.close()
        await self._library.close()
        await self._client.close()
        await self._driver.idle()
        for stream in self._stages.streams():
            await stream.close()

    def _records(self) -> Iterator[tuple[RecordKey, tuple[Origin, Record]]]:
        """Yield blocks that continue each other, as those of one long prompt."""
        parent: RecordKey | None = None
        for _ in range(self._blocks):
            engine_key = EngineKey(secrets.token_bytes(32))
            key = self._tenant.keys.record_key(self._namespace.digest, b"", engine_key)
            origin = Origin(
                self._namespace,
                engine_key,
                b"",
                parent,
                0,
                self._namespace.identity.block_tokens,
                self._nbytes,
                0,
            )
            blob = bytearray(secrets.token_bytes(self._nbytes))
            yield key, (origin, seal(_Packed(blob), key, origin, self._tenant))
            parent = key

    async def _offer(self, records: Mapping[RecordKey, tuple[Origin, Record]]) -> None:
        for key, (origin, record) in records.items():
            self.tier.packed(key, record, origin, self._tenant)
        await self.tier.drained()

    async def _bring(self, keys: Sequence[RecordKey]) -> None:
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        came = await asyncio.gather(*(self.tier.bring(self._namespace, key, deadline) for key in keys))
        if not all(came):
            raise RemoteFailed("bench", f"{came.count(False)} of {len(came)} blocks did not come back")

    async def _put(self, items: Sequence[tuple[str, bytes]]) -> None:
        _all_well(await self._client.put([(name, (value,), None) for name, value in items]))

    async def _get(self, names: Sequence[str]) -> None:
        _all_well(await self._client.get(names, 2 * self._nbytes, _let_go))


def _let_go(_: str, __: object) -> None:
    """Keep no value."""


def _all_well(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise RemoteFailed("bench", str(answer))


async def _in_parts(
    items: Sequence[T], call: Callable[[Sequence[T]], Awaitable[None]], size: int, at_once: int
) -> None:
    """Make calls for so many items each, as large and as many at once as those of the tier."""
    gate = asyncio.Semaphore(at_once)

    async def one(part: Sequence[T]) -> None:
        async with gate:
            await call(part)

    await asyncio.gather(*(one(items[start : start + size]) for start in range(0, len(items), size)))


async def _timed(call: _Work) -> Took:
    begun, cpu = time.perf_counter(), time.process_time()
    await call()
    return Took(time.perf_counter() - begun, time.process_time() - cpu)
