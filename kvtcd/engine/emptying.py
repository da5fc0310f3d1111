"""A namespace loses its blocks, every byte of them, durably: it goes itself, or begins anew."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial

from kvtcd.core import events as ev
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place
from kvtcd.engine import recovery
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.namespaces import TENANT_NAME, Namespace, Registry, persisted

_log = logging.getLogger(__name__)


async def empty(
    namespace: Namespace, registry: Registry, driver: Driver, *, renewed: int | None = None
) -> int:  # fmt: skip
    """Remove all blocks of a namespace; return how many there were.

    It needs no room: on a full device, blocks of the tenant's other namespaces may go from disk for it.

    Args:
        namespace: which; meanwhile nobody finds it.
        registry: of namespaces.
        driver: owns the catalog.
        renewed: the generation under which it stays; None: it goes, too.

    Raises:
        StoreFailed: it could not be completed; call it again.
    """
    owner = registry.tenants[namespace.tenant]
    registry.closing.add(namespace.number)
    try:
        driver.tell(ev.Close(namespace.number))
        keys = driver.catalog.blocks(namespace.number)
        await forget(driver, keys)
        if owner.writer is not None and not namespace.trial:
            others = [each for each in owner.namespaces.values() if each is not namespace and not each.trial]
            remaining = {each.name: persisted(each.identity, each.generation) for each in others}
            remaining[TENANT_NAME] = namespace.tenant.encode()
            if renewed is not None:
                remaining[namespace.name] = persisted(namespace.identity, renewed)
            left = await owner.writer.exclusive(
                partial(recovery.without, namespace=namespace.digest, remaining=remaining)
            )
            if left is not None:
                _unlinked(driver, others, left)
            driver.undropped.difference_update(keys)
        if renewed is None:
            registry.remove(namespace)
            driver.tell(ev.Ungovern(namespace.number))
        else:
            namespace.generation = renewed
    finally:
        registry.closing.discard(namespace.number)
    return len(keys)


async def forget(driver: Driver, keys: Sequence[RecordKey]) -> None:
    """Have blocks forgotten; return once their readers are done."""
    if keys:
        await driver.ask(Request(lambda ticket: ev.Delete(ticket, tuple(keys))), math.inf)


def _unlinked(driver: Driver, namespaces: Sequence[Namespace], left: set[RecordKey]) -> None:
    """Have the blocks of these namespaces forgotten on disk that are not left there."""
    catalog = driver.catalog
    known = (key for each in namespaces for key in catalog.blocks(each.number))
    gone = tuple(key for key in known if key not in left and Place.DISK in catalog.places(key))
    _log.warning(
        "a purge found no room to copy what stays: %d blocks of the same tenant left the disk", len(gone)
    )
    driver.tell(ev.Unlinked(gone))
