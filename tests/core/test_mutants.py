"""The random histories of a catalog notice when a rule is broken: each of these mutants dies."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.histories import KEYS, CatalogMachine
from support.scene import UNPACKS

from kvtcd.core import events as ev
from kvtcd.core import relief
from kvtcd.core.keys import RecordKey
from kvtcd.core.pins import Pins
from kvtcd.core.place import Place
from kvtcd.core.policy import Evict, HostTier, Policy
from kvtcd.core.requests import Requests
from kvtcd.core.residency import Residents
from kvtcd.core.victims import _Search, victims

if TYPE_CHECKING:
    from collections.abc import Iterator

HISTORIES = settings(
    max_examples=1000, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], report_multiple_bugs=False, print_blob=False,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
"""As many as are needed: the first that fails is the end, and is not shrunk."""


@pytest.fixture(autouse=True)
def _what_histories_patched_is_as_it_was() -> Iterator[None]:
    """A history that breaks off does not come to undo its patch."""
    yield
    mock.patch.stopall()
    assert relief.victims is victims


def evict_a_pinned_copy(monkeypatch) -> None:
    busy = _Search._busy

    def blind(search, entry) -> bool:
        with mock.patch.object(search._residents, "pins", Pins()):
            return busy(search, entry)

    monkeypatch.setattr(_Search, "_busy", blind)


def forget_under_a_reader(monkeypatch) -> None:
    let_go = Residents.let_go

    def blind(residents, entry) -> None:
        with mock.patch.object(residents, "pins", Pins()):
            let_go(residents, entry)

    monkeypatch.setattr(Residents, "let_go", blind)


def drop_bytes_under_a_reader(monkeypatch) -> None:
    drop = Residents.drop

    def blind(residents, entry, place) -> None:
        with mock.patch.object(residents, "pins", Pins()):
            drop(residents, entry, place)

    monkeypatch.setattr(Residents, "drop", blind)


def keep_bytes_behind_the_last_reader(monkeypatch) -> None:
    def careless(residents, key, place) -> None:
        residents.pins.give_back(key, place)
        residents.let_go(residents.entries[key])

    monkeypatch.setattr(Residents, "unpin", careless)


def drop_before_ready(monkeypatch) -> None:
    begin = Residents.begin

    def hasty(residents, entry, transfer, need, *, lossless=False) -> None:
        begin(residents, entry, transfer, need, lossless=lossless)
        if transfer.leaving and entry.key not in residents.pins:
            residents.drop(entry, transfer.source)

    monkeypatch.setattr(Residents, "begin", hasty)


def pin_while_queued(monkeypatch) -> None:
    get = Requests.get

    def eager(requests, ticket, key, straight=frozenset()) -> None:
        get(requests, ticket, key, straight)
        if ticket in requests._room.promotions.get(key, ()):
            requests._residents.pins.take(key, Place.HOST)

    monkeypatch.setattr(Requests, "get", eager)


def serve_what_is_still_filling(monkeypatch) -> None:
    places = Residents.places

    def early(residents, key) -> tuple[Place, ...]:
        entry = residents.entries.get(key)
        return tuple(entry.copies) if entry and not places(residents, key) else places(residents, key)

    monkeypatch.setattr(Residents, "places", early)


def let_a_leased_block_go(monkeypatch) -> None:
    monkeypatch.setattr(Residents, "irreplaceable", lambda *_, **__: False)


def lru(**fields: object) -> tuple[Policy, ...]:
    return (Policy("p", host=HostTier("raw", high=0.9, low=0.6), evict=Evict("lru"), **fields),) * 3


def filled(machine: CatalogMachine, key: RecordKey) -> None:
    machine.world.filling.remove(key)
    machine.world.bytes_at[key, Place.HOST] = True
    machine.tell(ev.Filled(key))


def a_reader_under_pressure() -> None:
    machine = CatalogMachine()
    machine.start(host=4, disk=0, descents=1, granule=1, policy=lru())
    machine.put(KEYS[0], 3, patient=False)
    filled(machine, KEYS[0])
    machine.get(KEYS[0])
    machine.put(KEYS[1], 3, patient=False)
    machine.teardown()


def read_where_it_lies() -> CatalogMachine:
    machine = CatalogMachine()
    machine.start(host=4, disk=12, descents=1, granule=1, policy=lru())
    machine.recover(KEYS[0], 1)
    machine.get(KEYS[0], UNPACKS)
    return machine


def a_reader_of_what_goes_with_its_file() -> None:
    machine = read_where_it_lies()
    machine.unlink({KEYS[0]})
    machine.teardown()


def a_reader_who_finds_damage() -> None:
    machine = read_where_it_lies()
    reader = machine.world.reading.pop()
    machine.world.spoilt.add(reader)
    machine.tell(ev.Release(*reader, damaged=True))
    machine.put(KEYS[0], 1)  # and waits for the end of the old one
    machine.teardown()


def a_reader_of_what_is_to_leave() -> None:
    machine = CatalogMachine()
    machine.start(host=4, disk=12, descents=1, granule=1, policy=lru())
    machine.recover(KEYS[0], 1)
    machine.get(KEYS[0])
    machine.finish(machine.world.moves[0], "moved", 0)
    machine.settle([KEYS[0]], evict=True)
    machine.teardown()


def a_lease_under_pressure() -> None:
    machine = CatalogMachine()
    machine.start(host=12, disk=6, descents=1, granule=1, policy=lru())
    machine.recover(KEYS[0], 3)
    machine.lease([KEYS[0]])
    machine.put(KEYS[1], 3)
    filled(machine, KEYS[1])
    machine.teardown()


@pytest.mark.parametrize("mutant", [drop_before_ready, pin_while_queued, serve_what_is_still_filling])
def test_a_broken_rule_is_noticed(monkeypatch, mutant) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(CatalogMachine, settings=HISTORIES)


@pytest.mark.parametrize(
    ("mutant", "history"),
    [
        (evict_a_pinned_copy, a_reader_under_pressure),
        (let_a_leased_block_go, a_lease_under_pressure),
        (forget_under_a_reader, a_reader_of_what_is_to_leave),
        (drop_bytes_under_a_reader, a_reader_of_what_goes_with_its_file),
        (keep_bytes_behind_the_last_reader, a_reader_who_finds_damage),
    ],
)
def test_a_broken_rule_that_seldom_matters_is_noticed_where_it_does(monkeypatch, mutant, history) -> None:
    history()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        history()
