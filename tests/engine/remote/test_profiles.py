"""Profiles travel in parts: whatever a store loses or is planted with, the true one arrives, and no other."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import asynccontextmanager
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import redis_servers
from support.fake_store import FakeStore
from support.patience import PATIENCE_S
from support.profile_folder import DictFolder
from support.s3_service import BUCKET, s3
from support.shared import fetch, host, stats, store, tiers, until, written
from support.slow_link import slow_link
from support.toy import ToyCodec, block, patient

from kvtcd.core.errors import Busy, NotFound, RemoteFailed, UnknownProfile
from kvtcd.core.place import Tier
from kvtcd.core.remote import names
from kvtcd.core.remote.breaker import Breaker
from kvtcd.core.remote.manifest import PART_BYTES, Manifest
from kvtcd.engine.errands import Errands
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.remote import profiles as fetching
from kvtcd.engine.remote import upkeep as sending
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import HIT, MISS, REFUSED, STORED, Figures
from kvtcd.engine.remote.figures import count as counted
from kvtcd.engine.remote.profiles import Profiles
from kvtcd.engine.remote.upkeep import Upkeep
from kvtcd.tiers.remote.redis_store import RedisStore
from kvtcd.tiers.remote.s3_store import S3Store

PART = 1000
PROFILE = (100).to_bytes(8, "little") + random.Random(1).randbytes(7 * PART)
"""Eight parts, the last of eight bytes; it begins as files of profiles do."""
DIGEST = hashlib.sha256(PROFILE).digest()
NAME = names.profile_name(DIGEST)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Parts of which a profile of 7 KB has eight, and no pauses."""
    for module in (sending, fetching):
        monkeypatch.setattr(module, "PART_BYTES", PART)
        monkeypatch.setattr(module, "_FIRST_S", 0.0)
        monkeypatch.setattr(module, "_LONGEST_S", 0.0)
    monkeypatch.setattr(fetching, "AGAIN_S", 0.0)
    monkeypatch.setattr(fetching, "WAIT_S", PATIENCE_S)
    monkeypatch.setattr(sending, "_SHORTEST_S", 0.01)


class Host:
    """The two ways of a profile, on a store."""

    def __init__(self, store, *, holds: bool, most: int = 1 << 30, timeout: float = PATIENCE_S) -> None:
        metrics, clock = Metrics(), count(step=1000)
        self.folder, self.lane = DictFolder({DIGEST: PROFILE} if holds else {}), Lane("profiles")
        self.figures, self.errands = Figures(metrics), Errands(metrics)
        breaker = Breaker(lambda: next(clock), lambda: 0.0)
        self.caller = Caller(store, breaker, self.figures, timeout=timeout, luck=lambda: 0.0)
        shared = (self.caller, self.folder, self.lane, self.figures)
        self.upkeep = Upkeep(*shared, every=0.01, ttl=None, luck=lambda: 0.0)
        self.profiles = Profiles(*shared, self.errands, most=most, luck=lambda: 0.0)

    async def looks(self) -> None:
        """Have the store hold the profile."""
        await self.upkeep._keep(DIGEST)

    async def asks(self) -> str:
        """Ask for the profile; return what became of it."""
        outcome = await self.profiles._fetch(DIGEST)
        await self.errands.ended()
        return outcome

    @property
    def refused(self) -> int:
        return counted(self.figures.profiles, REFUSED)

    async def close(self) -> None:
        await self.profiles.close()
        await self.lane.close()
        assert not self.folder.drafts


@asynccontextmanager
async def hosts(store, **options):
    """One that has the profile, and one that has not."""
    one, two = Host(store, holds=True), Host(store, holds=False, **options)
    try:
        yield one, two
    finally:
        await one.close()
        await two.close()


def parts_of(shared: FakeStore) -> list[str]:
    return [name for name in shared.values if name.startswith("profiles/parts/")]


@pytest.mark.asyncio
async def test_a_profile_goes_up_in_parts_and_comes_down_as_it_was() -> None:
    shared = FakeStore()
    async with hosts(shared) as (one, two):
        assert await two.asks() == MISS
        await one.looks()
        puts = shared.calls["put"]
        await one.looks()
        assert shared.calls["put"] == puts == 9, "what is there is not sent again"
        assert await two.asks() == HIT
        assert two.folder.contents == {DIGEST: PROFILE}

    assert Manifest.from_bytes(shared.values[NAME]).size == len(PROFILE)
    assert sorted(map(len, map(shared.values.get, parts_of(shared)))) == [8] + 7 * [PART]
    assert shared.asked["put"][-1] == NAME, "it is named when all of it is there"


harm = st.sampled_from(
    ["lose all", "lose a part", "lose the manifest", "corrupt a part", "corrupt the manifest", "swap parts",
     "plant another manifest", "plant garbage", "plant a profile as before", "plant a giant", "empty", "down"]
)  # fmt: skip


def done(shared: FakeStore, what: str, luck: random.Random) -> None:
    """Do harm to a store."""
    parts = sorted(parts_of(shared))
    match what:
        case "lose all":
            shared.values.clear()
        case "lose a part" if parts:
            del shared.values[luck.choice(parts)]
        case "lose the manifest":
            shared.values.pop(NAME, None)
        case "corrupt a part" if parts:
            name = luck.choice(parts)
            shared.values[name] = shared.values[name][:-1] + b"?"
        case "corrupt the manifest" if NAME in shared.values:
            shared.values[NAME] = shared.values[NAME][:-1] + b"?"
        case "swap parts" if len(parts) > 1:
            one, two = luck.sample(parts, 2)
            shared.values[one], shared.values[two] = shared.values[two], shared.values[one]
        case "plant another manifest":
            other = b"another"
            shared.values[names.part_name(hashlib.sha256(other).digest())] = other
            shared.values[NAME] = Manifest(len(other), (hashlib.sha256(other).digest(),), PART).to_bytes()
        case "plant garbage":
            shared.values[NAME] = luck.randbytes(luck.choice([1, 30, 3000]))
        case "plant a profile as before":
            shared.values[NAME] = PROFILE[:-1] + b"?"
        case "plant a giant":
            shared.values[NAME] = bytes(1 << 22)
        case "empty":
            shared.values[NAME] = b""
        case "down":
            shared.down = True


@given(st.lists(st.tuples(harm, st.sampled_from(["looks", "asks", "neither"])), max_size=12), st.integers())
def test_whatever_becomes_of_the_store_the_true_one_arrives(harms, seed) -> None:
    async def history() -> None:
        shared, luck = FakeStore(), random.Random(seed)
        async with hosts(shared) as (one, two):
            await one.looks()
            for what, then in harms:
                done(shared, what, luck)
                try:
                    await (one.looks() if then == "looks" else two.asks() if then == "asks" else _nothing())
                except RemoteFailed:
                    assert shared.down
                shared.down = False
                assert two.folder.contents in ({}, {DIGEST: PROFILE})
            for _ in range(
                2 + 2 * len(harms)
            ):  # each time, a corrupt part is refused and replaced; a swap makes two
                await two.asks()
                await one.looks()
            assert await two.asks() == HIT
            assert two.folder.contents == {DIGEST: PROFILE}

    sending.PART_BYTES = fetching.PART_BYTES = PART
    fetching_pause = fetching.GIVE_UP_S
    fetching.GIVE_UP_S = 0.0
    try:
        asyncio.run(history())
    finally:
        fetching.GIVE_UP_S = fetching_pause


async def _nothing() -> None:
    """Do neither."""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("what", "blamed"),
    [("corrupt a part", "part"), ("swap parts", "part"), ("corrupt the manifest", "manifest"),
     ("plant another manifest", "manifest"), ("plant garbage", "manifest"),
     ("plant a profile as before", "manifest"), ("plant a giant", "manifest")],
)  # fmt: skip
async def test_what_is_planted_is_refused_counted_removed_and_replaced(what: str, blamed: str) -> None:
    shared = FakeStore()
    async with hosts(shared) as (one, two):
        await one.looks()
        true = dict(shared.values)
        done(shared, what, random.Random(3))
        planted = {name for name, value in shared.values.items() if true.get(name) != value}
        assert await two.asks() == REFUSED
        assert two.refused == 1
        gone = true.keys() - shared.values.keys()
        assert len(gone) == 1
        assert gone <= planted
        assert (gone == {NAME}) == (blamed == "manifest")
        while await two.asks() != HIT:
            await one.looks()
        assert true.items() <= shared.values.items()


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["corrupt the manifest", "plant another manifest", "plant a giant"])
async def test_who_has_the_true_one_counts_and_replaces_what_he_finds_instead(what: str) -> None:
    shared = FakeStore()
    async with hosts(shared) as (one, two):
        await one.looks()
        true = shared.values[NAME]
        done(shared, what, random.Random(3))
        await one.looks()
        assert (shared.values[NAME], one.refused) == (true, 1)
        assert await two.asks() == HIT


@pytest.mark.asyncio
async def test_a_giant_costs_no_more_than_a_look() -> None:
    shared, asked = FakeStore(), []
    piece = shared.piece

    async def noted(name, start, nbytes):
        asked.append(nbytes)
        return await piece(name, start, nbytes)

    shared.piece = noted
    async with hosts(shared) as (_, two):
        done(shared, "plant a giant", random.Random(1))
        assert await two.asks() == REFUSED

    assert asked == [fetching.MOST_MANIFEST]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["in parts", "as before"])
async def test_no_more_is_fetched_than_is_allowed(kind: str) -> None:
    shared = FakeStore()
    async with hosts(shared, most=len(PROFILE) - 1) as (one, two):
        if kind == "in parts":
            await one.looks()
        else:
            shared.values[NAME] = PROFILE
        assert await two.asks() == REFUSED
        assert not [name for name in shared.asked.get("get", []) if "parts" in name]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [len(PROFILE), 3 * PART, 3 * PART - 1, 3 * PART + 1, 20])
async def test_what_a_release_before_has_put_in_one_is_read_and_is_replaced_by_parts(
    monkeypatch, size: int
) -> None:
    profile = PROFILE[:size]
    digest = hashlib.sha256(profile).digest()
    monkeypatch.setitem(globals(), "DIGEST", digest)
    monkeypatch.setitem(globals(), "PROFILE", profile)
    shared = FakeStore({names.profile_name(digest): profile})
    async with hosts(shared) as (one, two):
        assert await two.asks() == HIT
        assert two.folder.contents == {digest: profile}
        await one.looks()
        assert (one.refused, two.refused) == (0, 0)
    assert Manifest.from_bytes(shared.values[names.profile_name(digest)]).size == size


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["up", "down"])
async def test_an_outage_in_the_middle_costs_no_part_twice(way: str) -> None:
    class Failing(FakeStore):
        left = 1 << 30

        async def _call(self, kind, asked):
            if kind in {"put", "get"} and any("parts" in name for name in asked):
                self.left -= 1
                if self.left < 0:
                    self.down = True
            await super()._call(kind, asked)

    shared = Failing()
    async with hosts(shared) as (one, two):
        if way == "up":
            shared.left = 3
            with pytest.raises(RemoteFailed):
                await one.looks()
            assert len(parts_of(shared)) == 3
            shared.left, shared.down = 1 << 30, False
            await one.looks()
            assert len({*shared.asked["put"]}) == 9
            sent = [name for name in shared.asked["put"] if name in parts_of(shared)[:3]]
            assert len(sent) == 3
        else:
            await one.looks()
            shared.left = 3
            asking = asyncio.create_task(two.asks())
            await until(lambda: shared.down)
            assert two.profiles.left == 5
            shared.left, shared.down = 1 << 30, False
            assert await asking == HIT
            first = shared.asked["get"][:3]
            assert [shared.asked["get"].count(name) for name in first] == [1, 1, 1]


@pytest.mark.asyncio
async def test_before_half_of_its_time_is_over_all_is_written_again() -> None:
    shared = FakeStore()
    async with hosts(shared) as (one, _):
        one.upkeep._ttl = 500
        await one.looks()
        one.upkeep._renewals[DIGEST] = 0.0
        await one.looks()
        await one.looks()

    assert shared.calls["put"] == 18
    assert {*shared.ttls.values()} == {500}


class Coded(ToyCodec):
    """Packs with a profile, and unpacks where it is."""

    def __init__(self, identity, folder: DictFolder, *, packs: bool) -> None:
        super().__init__(identity, profile=DIGEST.hex() if packs else None)
        self.folder = folder

    def inflate(self, blob, scratch):
        if DIGEST not in self.folder.contents:
            raise UnknownProfile(DIGEST)
        return super().inflate(blob, scratch)


@asynccontextmanager
async def coded(path, shared, *, holds: bool, **options):
    """A daemon whose blocks need the profile."""
    folder = DictFolder({DIGEST: PROFILE} if holds else {})
    made = {"codec": lambda identity, _: Coded(identity, folder, packs=holds), "folder": folder}
    settings = patient(present_s=0.05, **options)
    async with host(path, shared, settings=settings, **made) as (toy, ns):
        yield toy, ns, folder


class Gated(FakeStore):
    """Holds back what concerns parts of profiles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = asyncio.Event()

    async def _call(self, kind, asked):
        if any("profiles/" in name for name in asked):
            await self.parts.wait()
        await super()._call(kind, asked)


@pytest.mark.asyncio
async def test_blocks_go_up_without_waiting_for_their_profile_and_come_once_it_has(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(fetching, "WAIT_S", 0.0)
    shared = Gated()
    async with (
        coded(tmp_path / "one", shared, holds=True) as (one, ns, _),
        coded(tmp_path / "two", shared, holds=False) as (two, other, folder),
    ):
        await store(one, ns, range(3))
        await written(one, 3)
        assert not parts_of(shared)
        assert await tiers(two, other, range(3)) == [Tier.REMOTE] * 3
        with pytest.raises(Busy):  # his time is his: it is for later readers
            await fetch(two, other, 0)
        assert two.catalog.blocks(other.number), "it is not lost for want of a profile that is on its way"
        shared.parts.set()
        await until(lambda: DIGEST in folder.contents or not two.service._remote.profiles.running)
        found = None
        async with asyncio.timeout(PATIENCE_S):
            while found is None:
                try:
                    found = await fetch(two, other, 0)
                except (Busy, NotFound):
                    await asyncio.sleep(0.01)
        assert found[0] == block(0)
    assert folder.contents == {DIGEST: PROFILE}


@pytest.mark.asyncio
async def test_a_store_that_has_lost_a_profile_is_sent_it_again_without_a_new_block(tmp_path) -> None:
    shared = FakeStore()
    async with coded(tmp_path / "one", shared, holds=True) as (one, ns, _):
        await store(one, ns, [1])
        await until(lambda: NAME in shared.values)
        for loss in ("lose all", "corrupt the manifest", "lose a part"):
            true = {name: shared.values[name] for name in [NAME, *parts_of(shared)]}
            done(shared, loss, random.Random(1))
            await until(lambda true=true: true.items() <= shared.values.items())
        assert stats(one).refused_profiles == 1


@pytest.mark.asyncio
async def test_a_daemon_that_ends_while_a_profile_comes_leaves_nothing_of_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fetching, "WAIT_S", 0.0)
    shared = Gated()
    shared.parts.set()
    async with coded(tmp_path / "one", shared, holds=True) as (one, ns, _):
        await store(one, ns, [1])
        await until(lambda: NAME in shared.values)
    get = shared.get

    async def held(asked, most, came):
        if "parts" in asked[0]:
            await asyncio.Event().wait()
        return await get(asked, most, came)

    shared.get = held
    async with (
        asyncio.timeout(PATIENCE_S),
        coded(tmp_path / "two", shared, holds=False) as (two, other, folder),
    ):
        with pytest.raises(Busy):
            await fetch(two, other, 1)
        await until(lambda: stats(two).parts_in == 8)
    assert (folder.drafts, folder.contents) == ([], {})


WHOLE = 48 << 20
LINK = 8 << 20
"""Bytes of a profile that no single call carries, and of the link a second."""


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [pytest.param("redis", marks=redis_servers.needed), "s3"])
async def test_a_profile_that_no_single_call_carries_goes_over_a_slow_link(
    tmp_path, monkeypatch, kind: str
) -> None:
    for module in (sending, fetching):
        monkeypatch.setattr(module, "PART_BYTES", PART_BYTES)
    profile = (100).to_bytes(8, "little") + random.Random(1).randbytes(WHOLE)
    monkeypatch.setitem(globals(), "PROFILE", profile)
    monkeypatch.setitem(globals(), "DIGEST", digest := hashlib.sha256(profile).digest())
    async with real(kind, tmp_path) as (make, lose):
        store = make(2.5)
        async with hosts(store, timeout=2.5) as (one, two):
            with pytest.raises(RemoteFailed):  # as it was sent before
                await two.caller.put([("whole", (profile,), None)])
            keeping = asyncio.create_task(one.upkeep.run())
            one.upkeep._due[digest] = 0.0
            await until(lambda: 0 < one.upkeep.left < 8)
            await lose()  # all that was sent
            await until(lambda: counted(one.figures.profiles, STORED) > 0)
            async with asyncio.timeout(2 * PATIENCE_S):
                while await two.asks() != HIT:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            keeping.cancel()
            assert two.folder.contents == {digest: profile}
            assert (one.refused, two.refused) == (0, 0)
        await store.close()


@asynccontextmanager
async def real(kind: str, folder):
    """Run a store at the end of a slow link; yield what makes a client of it, and what empties it."""
    if kind == "redis":
        async with redis_servers.single(folder) as server, slow_link(server.port, LINK) as port:

            async def lose() -> None:
                await server.ask("FLUSHALL")

            yield lambda timeout: RedisStore([("127.0.0.1", port)], cluster=False, timeout=timeout), lose
        return
    with s3() as url:
        target = int(url.rsplit(":", 1)[1])
        entry = {"region": "us-east-1", "key_id": "k", "secret": "s"}
        direct = S3Store(BUCKET, prefix="", timeout=60, endpoint=url, **entry)

        async def lose() -> None:
            await direct.delete([name async for name in direct.listing("profiles/")])

        async with slow_link(target, LINK) as port:
            endpoint = f"http://127.0.0.1:{port}"
            yield (
                (lambda timeout: S3Store(BUCKET, prefix="", timeout=timeout, endpoint=endpoint, **entry)),
                lose,
            )
