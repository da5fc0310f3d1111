"""Tenants and their namespaces over time: opened, recovered, registered, purged, closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from kvtcd.core import events as ev
from kvtcd.core.errors import Corrupt, StoreFailed
from kvtcd.core.identity import Identity, is_trial
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.core.messages import Removed
from kvtcd.core.policy import Policy, governing
from kvtcd.engine import recovery
from kvtcd.engine.chooser import Chooser
from kvtcd.engine.conditions import Conditions
from kvtcd.engine.devices import Devices
from kvtcd.engine.driver import Driver
from kvtcd.engine.emptying import empty, forget
from kvtcd.engine.envelopes import found
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import TENANT_NAME, Namespace, Registry, Tenant, persisted, restored
from kvtcd.engine.ports import Codec, CodecFactory, Environment
from kvtcd.engine.warmup import WARM_NAME, hottest, keys_of
from kvtcd.engine.writer import Writer

_log = logging.getLogger(__name__)
TAKEN_IN = 500
"""Records that the index takes in before others have a turn."""


class Tenancy:
    """Keeps the registry and the tenants' disk environments in step.

    Args:
        driver: owns the catalog.
        registry: shared with the driver.
        lane: on which profiles are read.
        metrics: told of what is refused.
        policies: in order; the last one fits everything.
        master: the master key.
        codecs: chooses profile and codec of a namespace.
        open_environment: opens a tenant's disk environment by the tenant tag; None without a disk tier.
        encrypt: encrypt what is packed.
        devices: told of policies.

    Attributes:
        hot: blocks found at start that were raw in memory before.
        conditions: of environments.
    """

    def __init__(
        self,
        driver: Driver,
        registry: Registry,
        *,
        lane: Lane,
        metrics: Metrics,
        policies: tuple[Policy, ...],
        master: bytes,
        codecs: CodecFactory,
        open_environment: Callable[[str], Environment] | None,
        encrypt: bool = False,
        devices: Devices | None = None,
    ) -> None:
        self.registry, self.devices, self._encrypt = registry, devices or Devices(), encrypt
        self._driver, self._metrics, self._chooser = driver, metrics, Chooser(codecs, lane, metrics)
        self._policies, self._master = policies, master
        self._open_environment = open_environment
        self._changing = asyncio.Lock()
        self.hot: list[RecordKey] = []
        self.conditions = Conditions(master, registry)
        self.devices.review(policies)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies in effect, in order."""
        return self._policies

    @property
    def expiring(self) -> bool:
        """Whether a policy sets a time to live."""
        return any(policy.disk.ttl for policy in self._policies)

    async def recover(self, tags: Sequence[str]) -> None:
        """Take in what an earlier process left on disk; `conditions` has what is wrong with it.

        Args:
            tags: hex names of the tenants' environments.
        """
        for tag in tags:
            await self._recover_tenant(tag)

    async def _recover_tenant(self, tag: str) -> None:
        try:
            writer = await self._open_writer(tag)
        except StoreFailed as error:
            _log.error("the environment of tenant %s is left out: %s", tag, error)
            self._metrics.internal_errors.labels("open").inc()
            self.conditions.note(tag, "left-out")
            return
        values = await writer.exclusive(partial(recovery.mend, tag=tag))
        if TENANT_NAME not in values:  # new, or begun anew after damage: whose it is shows when he comes
            await writer.close()
            return
        name = values.pop(TENANT_NAME).decode(errors="replace")
        self.hot += keys_of(values.pop(WARM_NAME, b""))
        keys = TenantKeys.derive(self._master, name)
        if keys.tag.hex() != tag:
            await writer.close()
            self.conditions.note(tag, "other-key")
            return
        self.registry.tenants[name] = Tenant(keys, writer, self._encrypt)
        for namespace, value in values.items():
            if is_trial(namespace):  # an earlier release kept it
                continue
            try:
                identity, generation = restored(namespace, value)
            except Corrupt as error:
                _log.warning("a namespace of tenant %s is left out: %s", name, error, extra={"tenant": name})
                continue
            await self._add(name, namespace, identity, generation)
        await self._recover_blocks(self.registry.tenants[name])

    async def _recover_blocks(self, tenant: Tenant) -> None:
        """Rebuild the index from envelopes alone; what fails its MAC or belongs nowhere is dropped."""
        assert tenant.writer is not None, "only tenants with an environment are recovered"
        known = {ns.digest: ns for ns in tenant.namespaces.values()}
        rows, refused = await tenant.writer.exclusive(
            lambda environment: recovery.scan(environment, tenant.keys, known, self._metrics)
        )
        for key in refused:
            with suppress(StoreFailed):  # logged by the writer; the record is refused again at the next start
                await tenant.writer.drop(key)
        for start in range(0, len(rows), TAKEN_IN):
            self._driver.tell(ev.Recovered(found(rows[start : start + TAKEN_IN])))
            await asyncio.sleep(0)

    async def register(self, tenant: str, name: str, identity: Identity) -> Namespace:
        """Register a namespace, durably; registering it again is no error.

        Raises:
            IdentityConflict: name and identity are taken, but not together.
            StoreFailed: it could not be made durable, or the tenant is left out.
        """
        self.conditions.admit(tenant)
        async with self._changing:
            known = self.registry.tenants.get(tenant)
            if known is None and is_trial(name):
                keys = TenantKeys.derive(self._master, tenant)
                self.registry.tenants[tenant] = Tenant(keys, None, guest=True)  # nothing of him is written
            elif known is None or (known.guest and not is_trial(name)):
                await self._add_tenant(tenant)
            held = self.registry.held(tenant, name, identity)
            if held is not None:
                return held
            generation = time.time_ns() // 1_000_000
            writer = self.registry.tenants[tenant].writer
            if writer is not None and not is_trial(name):
                value = persisted(identity, generation)
                await writer.exclusive(lambda environment: environment.put_namespace(name, value))
            return await self._add(tenant, name, identity, generation)

    async def _add_tenant(self, tenant: str) -> Tenant:
        keys = TenantKeys.derive(self._master, tenant)
        writer = None
        if self._open_environment is not None:
            writer = await self._open_writer(keys.tag.hex())
            await writer.exclusive(
                lambda environment: environment.put_namespace(TENANT_NAME, tenant.encode())
            )
        known = self.registry.tenants.setdefault(tenant, Tenant(keys, None, self._encrypt))
        known.writer, known.guest = writer, False
        return known

    async def _open_writer(self, tag: str) -> Writer:
        assert self._open_environment is not None, "there is a disk tier"
        lane = Lane(f"disk-{tag[:8]}")
        try:
            environment = await lane.run(self._open_environment, tag)
            aside = await lane.run(lambda: environment.set_aside)
        except BaseException:
            await lane.close()
            raise
        if environment.quarantined:
            self._metrics.quarantined.inc()
        if aside:  # now or earlier: until somebody has seen to it
            self.conditions.note(tag, "set-aside")
        return Writer(environment, lane)

    async def _add(self, tenant: str, name: str, identity: Identity, generation: int) -> Namespace:
        policy = governing(self._policies, name, identity)
        codec = await self._chooser.first(tenant, name, identity, policy)
        lossless = await self._chooser.lossless(identity, policy)
        namespace = self.registry.add(
            tenant, name, identity, generation=generation, policy=policy, codec=codec, lossless=lossless
        )
        self._govern(namespace)
        return namespace

    def _govern(self, namespace: Namespace) -> None:
        on_disk = self.registry.tenants[namespace.tenant].writer is not None and not namespace.trial
        self._driver.tell(ev.Govern(namespace.number, namespace.tenant, namespace.policy, on_disk))

    async def reload(self, policies: tuple[Policy, ...]) -> None:
        """Let other policies govern: all namespaces at once, and their blocks that are packed from now on.

        Profiles that have come since count too. What is packed already stays as it is, and is read as before.
        """
        async with self._changing:
            chosen: list[tuple[Namespace, Policy, Codec, Codec]] = []
            for namespace in self.registry.all():
                policy = governing(policies, namespace.name, namespace.identity)
                codec = await self._chooser.renewed(namespace, policy)
                chosen.append((namespace, policy, codec, await self._chooser.hurried(namespace, policy)))
            self._policies = policies
            self.devices.review(policies)
            self._driver.tell(ev.Mark(policies[-1]))
            for namespace, policy, codec, lossless in chosen:
                namespace.policy, namespace.codec, namespace.lossless = policy, codec, lossless
                if self.registry.numbered(namespace.number):  # not purged meanwhile
                    self._govern(namespace)

    async def profiled(self) -> None:
        """Pack namespaces that went without their profile as their policies ask, if that can be done now."""
        async with self._changing:
            for namespace in self.registry.all():
                if namespace.codec.reason:
                    namespace.codec = await self._chooser.renewed(namespace, namespace.policy)

    async def purge(self, tenant: str, name: str) -> int:
        """Remove a namespace and every byte of its blocks, durably; return how many there were.

        Raises:
            UnknownNamespace: there is none of that name.
            StoreFailed: it could not be completed; call it again.
        """
        removed = await empty(self.registry.find(tenant, name), self.registry, self._driver)
        if not is_trial(name):
            self.conditions.purged(tenant)
        return removed

    async def purge_set_aside(self, tenant: str) -> Removed:
        """Remove what of a tenant was set aside as damaged, durably: any of his namespaces may be in it.

        Raises:
            StoreFailed: it could not be completed; call it again.
        """
        async with self._changing:
            known = self.registry.tenants.get(tenant)
            if known is None or known.writer is None:
                known = await self._add_tenant(tenant)
            if known.writer is not None:
                await known.writer.exclusive(lambda environment: environment.drop_set_aside())
            self.conditions.purged(tenant)
        return Removed(0, set_aside=True)

    async def clear(self, namespace: Namespace) -> None:
        """Remove every byte of the blocks of a namespace, durably; it stays, and begins anew.

        Raises:
            StoreFailed: it could not be completed; call it again.
        """
        aside = self.conditions.has(namespace.tenant, "set-aside")
        if aside or self._driver.catalog.blocks(namespace.number):
            renewed = max(namespace.generation + 1, time.time_ns() // 1_000_000)
            await empty(namespace, self.registry, self._driver, renewed=renewed)
            self.conditions.purged(namespace.tenant)

    async def delete(self, keys: Sequence[RecordKey], owner: Tenant) -> None:
        """Remove blocks, durably; readers finish first.

        Raises:
            StoreFailed: a record could not be removed from disk.
        """
        await forget(self._driver, keys)
        if failed := self._driver.undropped & set(keys):
            raise StoreFailed("delete", f"{len(failed)} records could not be removed")
        if keys and owner.writer is not None:
            await owner.writer.exclusive(lambda environment: environment.sync())

    async def close(self) -> None:
        """Note what is hot, and close the environments."""
        for tenant in self.registry.tenants.values():
            if tenant.writer is None:
                continue
            numbers = {namespace.number for namespace in tenant.namespaces.values()}
            value = hottest(self._driver.catalog.residents, numbers.__contains__)
            with suppress(StoreFailed):  # a hint, which the writer has logged
                await tenant.writer.exclusive(partial(_note_hot, keys=value))
            await tenant.writer.close()


def _note_hot(environment: Environment, keys: bytes) -> None:
    environment.put_namespace(WARM_NAME, keys)
