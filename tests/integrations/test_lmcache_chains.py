"""Where an object lies in its prompt, and what a lookup has locked."""

from __future__ import annotations

from kvtcd.core.keys import EngineKey
from kvtcd.integrations.lmcache_chains import Chains, Position
from kvtcd.integrations.lmcache_locks import Locks

A, B, C = (EngineKey(letter * 32) for letter in (b"a", b"b", b"c"))


def test_a_lookup_tells_where_each_chunk_lies() -> None:
    chains = Chains()
    chains.seen("x", [A, B, C])

    assert chains.find("x", A) == Position(0, None)
    assert chains.find("x", C) == Position(2, B)
    assert chains.find("y", A) is None


def test_only_the_last_lookups_are_remembered() -> None:
    chains = Chains(most=3)
    chains.seen("x", [A, B])
    chains.seen("y", [A])
    chains.seen("x", [A])
    chains.seen("z", [C])

    assert chains.find("x", B) is None
    assert chains.find("x", A) == Position(0, None)


def test_a_lease_is_given_back_when_nothing_needs_it() -> None:
    locks = Locks()
    locks.taken("one", [A, B], until=10.0)
    locks.taken("two", [B], until=10.0)

    assert locks.released([A, C], now=1.0) == []
    assert locks.released([B], now=1.0) == ["one"]
    assert locks.released([B, B], now=1.0) == ["two"]
    assert len(locks) == 0


def test_a_lookup_that_is_never_retrieved_leaks_no_lock() -> None:
    locks = Locks()
    for number in range(100):
        locks.taken(str(number), [A], until=float(number))
        locks.released([], now=float(number))

    assert len(locks) == 0
