"""The random histories of a catalog notice when a rule is broken: each of these mutants dies."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.histories import CatalogMachine

from kvtcd.core.place import Place
from kvtcd.core.requests import Requests
from kvtcd.core.residency import Residents
from kvtcd.core.victims import _Search

HISTORIES = settings(
    max_examples=1000, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], report_multiple_bugs=False, print_blob=False,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
"""As many as are needed: the first that fails is the end, and is not shrunk."""


def evict_a_pinned_copy(monkeypatch) -> None:
    busy = _Search._busy

    def blind(search, entry) -> bool:
        pins = search._residents.pins.pop(entry.key, 0)
        try:
            return busy(search, entry)
        finally:
            if pins:
                search._residents.pins[entry.key] = pins

    monkeypatch.setattr(_Search, "_busy", blind)


def drop_before_ready(monkeypatch) -> None:
    begin = Residents.begin

    def hasty(residents, entry, transfer, need, *, lossless=False) -> None:
        begin(residents, entry, transfer, need, lossless=lossless)
        if transfer.leaving and entry.key not in residents.pins:
            residents.drop(entry, transfer.source)

    monkeypatch.setattr(Residents, "begin", hasty)


def pin_while_queued(monkeypatch) -> None:
    get = Requests.get

    def eager(requests, ticket, key) -> None:
        get(requests, ticket, key)
        if ticket in requests._room.promotions.get(key, ()):
            requests._residents.pins[key] += 1

    monkeypatch.setattr(Requests, "get", eager)


def serve_what_is_still_filling(monkeypatch) -> None:
    places = Residents.places

    def early(residents, key) -> tuple[Place, ...]:
        entry = residents.entries.get(key)
        return tuple(entry.copies) if entry and not places(residents, key) else places(residents, key)

    monkeypatch.setattr(Residents, "places", early)


def let_a_leased_block_go(monkeypatch) -> None:
    monkeypatch.setattr(Residents, "irreplaceable", lambda *_, **__: False)


MUTANTS = [
    pytest.param(evict_a_pinned_copy, marks=pytest.mark.slow),  # a rare meeting: hundreds of histories
    drop_before_ready,
    pin_while_queued,
    serve_what_is_still_filling,
    pytest.param(let_a_leased_block_go, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_rule_is_noticed(monkeypatch, mutant) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(CatalogMachine, settings=HISTORIES)
