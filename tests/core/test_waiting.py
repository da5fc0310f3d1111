"""Tickets that wait for several blocks."""

from __future__ import annotations

from kvtcd.core.keys import RecordKey
from kvtcd.core.waiting import Gathering

A, B, C = (RecordKey(bytes([n]) * 32) for n in range(3))


def test_a_ticket_is_complete_with_its_last_key() -> None:
    waiting = Gathering()
    assert waiting.add(1, [A, B])
    assert waiting.add(2, [B])

    assert waiting.done(A) == []
    assert waiting.done(B) == [1, 2]
    assert len(waiting) == 0
    assert B not in waiting


def test_the_first_failure_ends_a_ticket() -> None:
    waiting = Gathering()
    waiting.add(1, [A, B])
    waiting.add(2, [B, C])

    assert waiting.fail(A) == [1]
    assert waiting.done(B) == []
    assert waiting.done(C) == [2]


def test_a_cancelled_ticket_is_forgotten() -> None:
    waiting = Gathering()
    waiting.add(1, [A])
    waiting.cancel(1)
    waiting.cancel(9)

    assert A not in waiting
    assert waiting.done(A) == []


def test_nothing_to_wait_for() -> None:
    assert not Gathering().add(1, [])
