"""The whole daemon for those who do not speak HTTP: namespaces, blocks, and their life cycle."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from collections.abc import Sequence

from kvtcd.core import events as ev
from kvtcd.core.errors import KvtcdError, UnknownNamespace
from kvtcd.core.events import Action, Event
from kvtcd.core.identity import Identity, is_trial
from kvtcd.core.messages import Removed
from kvtcd.core.policy import Policy
from kvtcd.engine import gauges
from kvtcd.engine.blocks import Blocks
from kvtcd.engine.changes import Changes
from kvtcd.engine.driver import Driver
from kvtcd.engine.errands import Errands
from kvtcd.engine.feed import Feeds
from kvtcd.engine.leases import Leases
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.overview import Overview
from kvtcd.engine.ports import Memory
from kvtcd.engine.prefixes import Prefixes
from kvtcd.engine.pulse import Pulse, Worker
from kvtcd.engine.recorder import Recorder
from kvtcd.engine.remote.generations import FRESH_S
from kvtcd.engine.remote.tier import RemoteTier
from kvtcd.engine.reporter import Reporter
from kvtcd.engine.streams import Stream
from kvtcd.engine.tally import Tally
from kvtcd.engine.tenancy import Tenancy
from kvtcd.engine.warmup import warm_up

_log = logging.getLogger(__name__)
TICK = 1.0
"""Seconds between two looks for blocks whose time is over."""


class Service:
    """One daemon's cache. All methods belong to the loop; `deadline` is a time of the loop's clock.

    Args:
        driver: owns the catalog.
        memory: the host tier.
        tenancy: tenants and namespaces.
        lanes: threads that blocks are moved on, closed at the end.
        metrics: shown by `metrics_text`.
        recorder: writes down what is asked; None: nothing does.
        remote: a store that is shared with other daemons, if there is one.

    Attributes:
        boot_id: another one after every start.
        ready: blocks are served and taken.
        blocks: what is done with blocks.
        prefixes: how much of a prefix is here.
        feeds: for those who listen to what becomes of them.
        leases: by which they stay for a while.
        overview: all of it in numbers.
        conditions: of tenants' disk environments, and whom they keep out.
        pulse: whether all threads get something done.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        memory: Memory,
        tenancy: Tenancy,
        lanes: Sequence[Stream],
        metrics: Metrics,
        recorder: Recorder | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self.metrics = metrics
        self.ready = False
        self._tally = Tally(metrics)
        self._errands = Errands(metrics)
        self._recorder = recorder
        self.blocks = Blocks(
            driver=driver, memory=memory, tenancy=tenancy, metrics=metrics, tally=self._tally,
            errands=self._errands, recorder=recorder, remote=remote,
        )  # fmt: skip
        self.prefixes = Prefixes(driver.catalog, tenancy.registry, recorder, remote)
        self.feeds = Feeds(self.boot_id, metrics)
        self.leases = Leases(driver, metrics)
        self.overview = Overview(
            self.boot_id,
            driver,
            tenancy.registry,
            self._tally,
            faults=lambda: self.conditions.all + tenancy.devices.faults,
            damaged=metrics.damage,
            remote=remote,
        )
        self.conditions = tenancy.conditions
        self._driver, self._tenancy, self._lanes = driver, tenancy, lanes
        self._guests: list[Worker] = []
        self._remote = remote
        self._registry = tenancy.registry
        self.pulse = Pulse(self._workers)
        self._reporter = Reporter(driver, tenancy.registry, self.feeds, self._errands)
        self.blocks.sharing.unshared = self._reporter.unshared
        self._changes = Changes(driver.catalog.residents)
        driver.observers.append(self._observe)
        self._ticking: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def recover(self, tags: Sequence[str]) -> None:
        """Take in what an earlier process left, and be ready unless that is under another key."""
        gc.disable()  # what is taken in has no cycles to be found, and looking takes as long as the rest
        try:
            await self._tenancy.recover(tags)
        finally:
            gc.enable()
        if self.conditions.hopeless:
            return
        gc.freeze()  # nor is it looked at again whenever something else has grown
        self._watch_the_clock()
        self.ready = True
        if self._remote:
            self._remote.start(self._purged_elsewhere, self._reporter.shared, self._tenancy.profiled)
        warming = warm_up(self._driver, self._tenancy.hot, self.metrics)
        self._warming = self._errands.start("warm-up", warming)
        self._watching = self._errands.start("watch", self.overview.watch(self.metrics.loop_lag.observe))

    def watch(self, *workers: Worker) -> None:
        """Have the pulse and the metrics know of threads that others than the service own and close."""
        self._guests += workers

    def _workers(self) -> list[Worker]:
        writers = (tenant.writer for tenant in self._registry.tenants.values())
        remote = [self._remote.lane] if self._remote else []
        return [*self._lanes, *remote, *self._guests, *(writer for writer in writers if writer)]

    def _watch_the_clock(self) -> None:
        if self._tenancy.expiring and self._ticking is None:
            self._ticking = self._errands.start("tick", self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                self._driver.tell(ev.Tick())
            except Exception:  # noqa: BLE001 - logged and counted; the next one may fare better
                _log.exception("unexpected failure while looking for blocks whose time is over")
                self.metrics.internal_errors.labels("tick").inc()

    @property
    def draining(self) -> bool:
        """Whether blocks are taken no more."""
        return self.blocks.draining

    def drain(self) -> None:
        """Take no more blocks: the end is near."""
        self.ready, self.blocks.draining = False, True

    def _observe(self, told: Event, actions: Sequence[Action]) -> None:
        if isinstance(told, ev.Recovered):  # a million of them at the start, and nobody listens yet
            for copy in told.found:
                self._tally.recovered(copy)
            if not actions:
                return
        if changes := self._changes.read(told, actions):
            self._tally.count(changes)
            self._reporter.report(changes)

    async def close(self, deadline: float) -> None:
        """Write to disk what the policies say, let running moves end, close everything.

        Args:
            deadline: what is not on disk by then is lost, and counted.
        """
        self.drain()
        self.leases.close()
        for task in (self._warming, self._ticking, self._watching):
            if task:
                task.cancel()
        for namespace in self._registry.all():
            if namespace.policy.flush == "host":
                try:
                    results = await self.blocks.flush_all(namespace, deadline)
                    lost = sum(result.outcome == "dropped" for result in results)
                except KvtcdError as error:
                    _log.warning("not everything of %s was written: %s", namespace.name, error)
                else:
                    if lost:
                        _log.warning("%d blocks of %s were not written", lost, namespace.name)
        if self._remote:
            await self._remote.close(deadline)
        await self._errands.ended()
        await self._driver.idle()
        self.feeds.close()
        await self._errands.ended()
        if self._recorder:
            await self._recorder.close()
        await self._tenancy.close()
        for lane in self._lanes:
            await lane.close()

    async def reopen(self) -> None:
        """Go on recording in a new file, if the old one was moved away."""
        if self._recorder:
            await self._recorder.reopen()

    def policies(self, tenant: str) -> list[tuple[Policy, list[str]]]:
        """Return the policies in effect, in order, each with the namespaces of a tenant that it governs."""
        mine = self.namespaces(tenant)
        return [(p, [n.name for n in mine if n.policy is p]) for p in self._tenancy.policies]

    async def reload(self, policies: tuple[Policy, ...]) -> None:
        """Let other policies govern from now on; no block is dropped by that alone."""
        await self._tenancy.reload(policies)
        self._watch_the_clock()
        _log.info("policies in effect: %s", ", ".join(policy.name for policy in policies))

    async def register(self, tenant: str, name: str, identity: Identity) -> Namespace:
        """Register a namespace, durably; registering it again is no error.

        Raises:
            IdentityConflict: name and identity are taken, but not together.
            StoreFailed: it could not be made durable.
        """
        namespace = await self._tenancy.register(tenant, name, identity)
        if namespace.trial:
            self._tally.ignore(namespace.number)
        return namespace

    def namespace(self, tenant: str, name: str) -> Namespace:
        """Return a namespace.

        Raises:
            UnknownNamespace: this tenant has none of that name.
        """
        return self._registry.find(tenant, name)

    def namespaces(self, tenant: str) -> list[Namespace]:
        """Return the namespaces of a tenant."""
        known = self._registry.tenants.get(tenant)
        return [each for each in known.namespaces.values() if not each.trial] if known else []

    async def purge(self, tenant: str, name: str) -> Removed:
        """Remove a namespace and every byte of its blocks, durably; return how many blocks there were.

        What of the tenant was set aside as damaged goes, too: without a namespace of that name as well. The
        store that is shared with other daemons forgets it as soon as it can be asked, they soon after.

        Raises:
            UnknownNamespace: there is none of that name.
            StoreFailed: it could not be completed, call it again; or the tenant is left out.
        """
        self.conditions.admit(tenant)
        try:
            purging = self._purge(self._registry.find(tenant, name))
        except UnknownNamespace:  # it may have been, in what was set aside
            if not self.conditions.has(tenant, "set-aside") or is_trial(name):
                raise UnknownNamespace(name, purging=True) from None
            purging = self._tenancy.purge_set_aside(tenant)
        # Half of it may be on disk when its caller goes, so it is ended without him.
        return await self._errands.finish("purge", purging)

    async def _purge(self, namespace: Namespace) -> Removed:
        if remote := None if namespace.trial else self._remote:
            await remote.purge(namespace)
        self.leases.purge(namespace.number)
        aside = self.conditions.has(namespace.tenant, "set-aside") and not namespace.trial
        removed = await self._tenancy.purge(namespace.tenant, namespace.name)
        self._tally.forget(namespace.number)
        self.prefixes.forget(namespace)
        self._reporter.purged(namespace)
        if remote is None:
            return Removed(removed, aside)
        told = await remote.purged(namespace)
        return Removed(removed, aside, "done" if told else "pending", FRESH_S)

    async def _purged_elsewhere(self, namespace: Namespace) -> None:
        """Empty a namespace that another daemon has purged."""
        assert self._remote is not None, "it is who says so"
        self._remote.emptied(namespace)
        self.leases.purge(namespace.number)
        await self._tenancy.clear(namespace)
        self.prefixes.forget(namespace)
        self._reporter.purged(namespace)

    def metrics_text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        if self._remote:
            self._remote.show()
        gauges.show(
            self.metrics, self._driver, self._tally, [*self._lanes, *self._guests], self._registry.all(),
            degraded=self.overview.degraded,
        )  # fmt: skip
        return self.metrics.text()
