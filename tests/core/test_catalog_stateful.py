"""Random histories of a catalog against a world that finishes, fails and reorders work."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from support.histories import KEYS, CatalogMachine

from kvtcd.core import events as ev
from kvtcd.core.place import Place
from kvtcd.core.policy import DiskTier, Evict, HostTier, Policy


def raw(**fields: object) -> tuple[Policy, ...]:
    return (Policy("p", host=HostTier("raw", high=0.9, low=0.6), evict=Evict("lru"), **fields),) * 3


def test_a_block_that_is_to_leave_the_host_keeps_its_disk_copy() -> None:
    """Found by a long run: a demotion waited for ever when the disk copy went under a held host copy."""
    machine = CatalogMachine()
    machine.start(host=4, disk=12, descents=1, granule=1, policy=raw())
    machine.recover(KEYS[0], 1)
    machine.get(KEYS[0])
    machine.finish(machine.world.moves[0], "moved", 0)
    machine.settle([KEYS[0]], evict=True)
    for number, nbytes in enumerate((3, 3, 3, 2), start=1):
        machine.recover(KEYS[number], nbytes)
    machine.teardown()


def test_a_block_that_goes_while_a_reader_waits_for_room_is_not_moved_up() -> None:
    """Found by a long run: the only copy was evicted for the very room that the reader waited for."""
    machine = CatalogMachine()
    machine.start(host=8, disk=4, descents=1, granule=2, policy=raw(disk=DiskTier("evict")))
    machine.put(KEYS[2], 1)
    machine.world.filling.clear()
    machine.tell(ev.Abandoned(KEYS[2]))
    machine.recover(KEYS[0], 3)
    machine.put(KEYS[1], 3)
    machine.world.filling.clear()
    machine.world.bytes_at[KEYS[1], Place.HOST] = True
    machine.tell(ev.Filled(KEYS[1]))
    machine.get(KEYS[0])
    machine.finish_drop(machine.world.drops[0])
    machine.truth()
    machine.teardown()


CatalogMachine.TestCase.settings = settings(
    max_examples=4 * settings().max_examples,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
"""400; with HYPOTHESIS_PROFILE=nightly 20,000."""
TestCatalog = CatalogMachine.TestCase
