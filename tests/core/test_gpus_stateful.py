"""Random histories of a catalog whose blocks are lifted to two GPUs, while policies change their homes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from support.histories import KEYS, CatalogMachine, namespace_of

from kvtcd.core import events as ev
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import DiskTier, Evict, HostTier, Policy, Promote

homes = st.sampled_from(["gpu", "cuda:0", "cuda:1", "cuda:1", "cuda:2", "host"])


class GpuMachine(CatalogMachine):
    """What a catalog must hold is as ever; the host has room for some of what is stored at the start."""

    @initialize(
        host=st.integers(6, 20), one=st.integers(3, 9), other=st.integers(2, 9), first=homes, second=homes,
        sizes=st.lists(st.integers(1, 4), min_size=len(KEYS), max_size=len(KEYS)),
    )  # fmt: skip
    def start(self, host, one, other, first, second, sizes) -> None:
        raw, disk = HostTier("raw", high=0.9, low=0.6), DiskTier(high=0.95, low=0.8)
        policy = Policy("p", host=raw, disk=disk, evict=Evict("lru"))
        policies = tuple(replace(policy, promote=Promote(to)) for to in (first, second, second))
        super().start(host, 30, 2, 1, policies, gpus={"cuda:0": one, "cuda:1": other})
        for key, nbytes in zip(KEYS, sizes, strict=True):
            self.put(key, nbytes)
            self.catch_up()

    @rule()
    def readers_end(self) -> None:
        while self.world.reading:
            self.tell(ev.Release(*self.world.reading.pop()))

    @rule(number=st.integers(1, 3), to=homes)
    def rehome(self, number: int, to: str) -> None:
        self.govern(number, replace(self.policies[number], promote=Promote(to)))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def lift(self, keys) -> None:
        for key in keys:
            self.prefetch(key, Tier.GPU)

    @rule(key=st.sampled_from(KEYS), to=homes)
    def lift_as_the_home_changes(self, key, to) -> None:
        self.prefetch(key, Tier.GPU)
        self.rehome(namespace_of(key), to)

    @precondition(lambda self: self.world.moves)
    @rule(
        data=st.data(), most=st.integers(1, 4), outcome=st.sampled_from(["moved", "moved", "moved", "failed"])
    )
    def moves_end(self, data, most, outcome) -> None:
        for _ in range(most):
            if self.world.moves:
                self.finish(data.draw(st.sampled_from(self.world.moves)), outcome, 0)

    @precondition(lambda self: any(drop.device for drop in self.world.drops))
    @rule()
    def gpus_forget(self) -> None:
        for drop in [drop for drop in self.world.drops if drop.device]:
            self.finish_drop(drop)

    @precondition(lambda self: any(self.catalog.places(key)[:2] == (Place.GPU, Place.DISK) for key in KEYS))
    @rule(data=st.data())
    def come_down(self, data) -> None:
        """Read a block that has left the host, but not its GPU."""
        there = [key for key in KEYS if self.catalog.places(key)[:2] == (Place.GPU, Place.DISK)]
        self.get(data.draw(st.sampled_from(there)))


GpuMachine.TestCase.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=40, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestGpus = GpuMachine.TestCase
