"""`kvtcd bench remote`: how fast the remote tier is, beside the library alone that speaks to the same store.

The same values, as large as records of blocks that do not shrink, go to the store and come back: by the tier,
with its queue, names, MACs and host memory, and by the client library alone, in batches as large and as many
at once. All take turns within each round; figures are medians over rounds. Where other work keeps the cores
busy, seconds that pass say more of the scheduler than of the way: seconds of this process's CPU stand beside.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from kvtcd import terminal
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
from kvtcd.core.remote.names import join
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings
from kvtcd.engine.driver import Driver
from kvtcd.engine.emptying import forget
from kvtcd.engine.lanes import on_threads
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.ports import RemoteStore
from kvtcd.engine.remote.arrivals import TOGETHER
from kvtcd.engine.remote.build import Settings, remote_tier
from kvtcd.engine.remote.writing import BATCH_BYTES, WRITERS
from kvtcd.engine.steps import Origin, Record, seal
from kvtcd.lab.figures import write_json
from kvtcd.terminal import Table
from kvtcd.tiers.disk import Put, footprint
from kvtcd.tiers.memory import GRANULE, HostMemory

MIB = 1 << 20
_TENANT = "bench"
T = TypeVar("T")
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One direction, one size.

    Attributes:
        verb: put or get.
        mib: of a record.
        tier_mb_s: 10⁶ bytes per second, by the tier.
        alone_mb_s: by the client library alone.
        ratio: of these, the median of the ratios of rounds.
        cpu_ratio: the same by seconds of CPU.
    """

    verb: str
    mib: int
    tier_mb_s: float
    alone_mb_s: float
    ratio: float
    cpu_ratio: float


class _Took(NamedTuple):
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Packed:
    """A blob that nobody packed."""

    blob: bytearray
    codec: CodecId = CodecId.LOSSLESS
    reason: str | None = None


def command(
    *, store: Callable[[], RemoteStore], sizes: Sequence[int], blocks: int, rounds: int, json: Path | None
) -> None:
    """Measure, show a table, and write the figures if asked.

    Raises:
        RemoteFailed: the store cannot be asked.
    """
    rows: list[Row] = []
    console = terminal.console()
    with terminal.progress(console, transient=True) as progress:
        for mib in progress.track(sizes, description="records, size by size"):
            with tempfile.TemporaryDirectory(prefix="kvtcd-bench-") as folder:
                rows += asyncio.run(measure(store(), Path(folder), mib=mib, blocks=blocks, rounds=rounds))
    table = Table("verb", "MiB", "tier MB/s", "alone MB/s", "ratio", "by CPU")
    for row in rows:
        table.add_row(
            row.verb,
            str(row.mib),
            f"{row.tier_mb_s:,.0f}",
            f"{row.alone_mb_s:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.cpu_ratio:.2f}",
        )
    console.print(table)
    if json:
        write_json(json, "bench remote", {"rows": [asdict(row) for row in rows]})


async def measure(store: RemoteStore, folder: Path, *, mib: int, blocks: int, rounds: int) -> list[Row]:
    """Return a row for each direction; the first round warms up and is not counted."""
    bench = _Bench(store, folder, mib * MIB, blocks)
    bench.tier.start(_stay, lambda _: None, _as_before)
    taken: dict[str, list[_Took]] = {}
    try:
        for number in range(rounds + 1):
            seconds = await bench.round()
            for way in seconds if number else ():
                taken.setdefault(way, []).append(seconds[way])
    finally:
        await bench.close()
    size, rows = mib * blocks * MIB / 1e6, list[Row]()
    for verb in ("put", "get"):
        tier, alone = taken[f"tier {verb}"], taken[f"alone {verb}"]
        rows.append(
            Row(
                verb, mib, size / median(t.seconds for t in tier), size / median(a.seconds for a in alone),
                median(a.seconds / t.seconds for t, a in zip(tier, alone, strict=True)),
                median(a.cpu_s / t.cpu_s for t, a in zip(tier, alone, strict=True)),
            )
        )  # fmt: skip
    return rows


async def _stay(_: Namespace) -> None:
    """Purge nothing."""


async def _as_before() -> None:
    """Pack as before."""


class _Bench:
    """A tier on a store, with a catalog of its own, and the library of the same store."""

    def __init__(self, store: RemoteStore, folder: Path, nbytes: int, blocks: int) -> None:
        self._store, self._nbytes, self._blocks = store, nbytes, blocks
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
        self.tier = remote_tier(
            store, Settings(timeout=60.0, queue=4 * blocks * nbytes), driver=self._driver, memory=memory,
            registry=self._registry, metrics=metrics, profiles=profiles,
            derive=lambda tenant: TenantKeys.derive(master, tenant), ledger=Ledger(), save=lambda _: None,
        )  # fmt: skip

    def _govern(self, policy: Policy) -> None:
        self._driver.tell(Govern(self._namespace.number, _TENANT, policy, on_disk=False))

    async def round(self) -> dict[str, _Took]:
        """Move new values there and back, by the tier and by the library alone; return the seconds."""
        records = {RecordKey(key): record for key, record in self._records()}
        values = {
            f"bench/{secrets.token_hex(16)}": join(record.envelope, record.bytes)
            for _, record in records.values()
        }
        taken = {"tier put": await _timed(lambda: self._offer(records))}
        taken["alone put"] = await _timed(
            lambda: _in_parts([*values.items()], self._put, BATCH_BYTES // self._nbytes)
        )
        taken["tier get"] = await _timed(lambda: self._bring(list(records)))
        taken["alone get"] = await _timed(lambda: _in_parts(list(values), self._get, TOGETHER))
        await self.tier.forget(self._namespace, list(records))
        await self._store.delete(list(values))
        await forget(self._driver, list(records))
        return taken

    async def close(self) -> None:
        """End the tier, and with it the connections to the store."""
        await self.tier.close(asyncio.get_running_loop().time() + _PATIENCE_S)
        await self._driver.idle()
        for stream in self._stages.streams():
            await stream.close()

    def _records(self) -> Iterator[tuple[RecordKey, tuple[Origin, Record]]]:
        for _ in range(self._blocks):
            engine_key = EngineKey(secrets.token_bytes(32))
            key = self._tenant.keys.record_key(self._namespace.digest, b"", engine_key)
            origin = Origin(
                self._namespace,
                engine_key,
                b"",
                None,
                0,
                self._namespace.identity.block_tokens,
                self._nbytes,
                0,
            )
            blob = bytearray(secrets.token_bytes(self._nbytes))
            yield key, (origin, seal(_Packed(blob), key, origin, self._tenant))

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
        _all_well(await self._store.put([(name, value, None) for name, value in items]))

    async def _get(self, names: Sequence[str]) -> None:
        _all_well(await self._store.get(names, 2 * self._nbytes))


def _all_well(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise RemoteFailed("bench", str(answer))


async def _in_parts(items: Sequence[T], call: Callable[[Sequence[T]], Awaitable[None]], size: int) -> None:
    """Make calls for so many items each, as many at once as the tier does."""
    gate, size = asyncio.Semaphore(WRITERS), max(1, size)

    async def one(part: Sequence[T]) -> None:
        async with gate:
            await call(part)

    await asyncio.gather(*(one(items[start : start + size]) for start in range(0, len(items), size)))


async def _timed(call: Callable[[], Awaitable[None]]) -> _Took:
    begun, cpu = time.perf_counter(), time.process_time()
    await call()
    return _Took(time.perf_counter() - begun, time.process_time() - cpu)
