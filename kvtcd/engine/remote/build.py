"""Puts the parts of the remote tier together."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtcd.core.keys import TenantKeys
from kvtcd.core.remote.breaker import Breaker
from kvtcd.core.remote.ledger import Ledger, Save
from kvtcd.core.remote.presence import Presence
from kvtcd.engine.driver import Driver
from kvtcd.engine.errands import Errands
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Registry
from kvtcd.engine.ports import Memory, RemoteStore
from kvtcd.engine.remote.arrivals import Arrivals
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures
from kvtcd.engine.remote.folder import Folder
from kvtcd.engine.remote.generations import Generations
from kvtcd.engine.remote.profiles import Profiles
from kvtcd.engine.remote.purges import Purges
from kvtcd.engine.remote.questions import Questions
from kvtcd.engine.remote.tier import RemoteTier
from kvtcd.engine.remote.upkeep import Upkeep
from kvtcd.engine.remote.writing import Writing

REMEMBERED = 1 << 17
"""Names of which it is remembered whether they are there: some 30 MB."""
LACKED = 1 << 12
"""Names that are being written, since they were missing: many times those of a batch."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator decides.

    Attributes:
        timeout: seconds of one attempt of a call.
        look_s: seconds that a match waits.
        queue: bytes that wait to be written at most.
        ttl: seconds that a record is kept; None: as long as the store likes.
        present_s: for how long what was there is taken to be there.
        absent_s: for how long what was missing is taken to be missing.
        encrypt: encrypt what is not.
        profile: bytes of a profile that is fetched at most.
    """

    timeout: float = 2.0
    look_s: float = 0.05
    queue: int = 256 << 20
    ttl: int | None = None
    present_s: float = 300.0
    absent_s: float = 10.0
    encrypt: bool = False
    profile: int = 4 << 30


def remote_tier(
    store: RemoteStore, settings: Settings, *, driver: Driver, memory: Memory, registry: Registry,
    metrics: Metrics, profiles: Folder, profile_lane: Lane, derive: Callable[[str], TenantKeys],
    ledger: Ledger, save: Save, luck: Callable[[], float] = random.random,
) -> RemoteTier:  # fmt: skip
    """Return a tier on a store.

    Args:
        store: where records lie.
        settings: of the operator.
        driver: owns the catalog.
        memory: the host tier.
        registry: of namespaces.
        metrics: whose registry its figures are in.
        profiles: those that are here.
        profile_lane: on which they are read and written, of whoever loads them.
        derive: returns a tenant's keys.
        ledger: what an earlier process left to be done.
        save: makes it durable.
        luck: returns a number of [0, 1).
    """
    figures, lane, errands = Figures(metrics), Lane("remote"), Errands(metrics)
    caller = Caller(store, Breaker(time.monotonic, luck), figures, timeout=settings.timeout, luck=luck)
    presence = Presence(
        time.monotonic, present_s=settings.present_s, absent_s=settings.absent_s, capacity=REMEMBERED
    )
    lacked = Presence(time.monotonic, present_s=0.0, absent_s=settings.absent_s, capacity=LACKED)
    generations = Generations(caller, registry, ledger, save, lane, figures=figures)
    travelling = Profiles(
        caller, profiles, profile_lane, figures, errands, most=settings.profile, luck=luck
    )  # fmt: skip
    upkeep = Upkeep(
        caller, profiles, profile_lane, figures, every=settings.present_s, ttl=settings.ttl, luck=luck
    )  # fmt: skip
    writing = Writing(
        caller, generations, upkeep, Questions(caller, presence, lacked), presence, registry=registry,
        lane=lane, figures=figures, capacity=settings.queue, ttl=settings.ttl, encrypt=settings.encrypt,
    )  # fmt: skip
    arrivals = Arrivals(
        caller, generations, presence, driver=driver, memory=memory, registry=registry, lane=lane,
        figures=figures, errands=errands,
    )  # fmt: skip
    purges = Purges(caller, generations, derive, luck)
    return RemoteTier(
        caller=caller, generations=generations, presence=presence, writing=writing, arrivals=arrivals,
        profiles=travelling, upkeep=upkeep, purges=purges, registry=registry, lane=lane, figures=figures,
        errands=errands, look_s=settings.look_s,
    )  # fmt: skip
