"""A stream of transactions that follows from a seed, so that whoever knows it knows every state it passed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from support.crash.sealed import key_of, seal, version_of

from kvtcd.tiers.disk import Environment, Put

RECORDS = 24
QUOTA = 16 << 20
SYNC_EVERY = 8

State = dict[int, tuple[int, int]]
"""Record index -> (version, blob bytes)."""


@dataclass(frozen=True)
class Step:
    """One transaction."""

    puts: State
    drops: tuple[int, ...]

    def records(self) -> list[Put]:
        """Return what is put, as the environment takes it."""
        return [seal(key_of(index), version, nbytes) for index, (version, nbytes) in self.puts.items()]

    def applied(self, state: State) -> State:
        """Return the state after this step."""
        left = {index: record for index, record in state.items() if index not in self.drops}
        return left | self.puts


def step(seed: int, number: int) -> Step:
    """Return the `number`-th transaction: new records, overwrites, drops; small, of one chunk, of several."""
    draw = random.Random(f"{seed}/{number}")
    sizes = (draw.randrange(1, 3000), draw.randrange(3000, 200_000), draw.randrange(262_128, 700_000))
    puts = {
        draw.randrange(RECORDS): (number, draw.choices(sizes, (2, 3, 1))[0])
        for _ in range(draw.randrange(1, 5))
    }
    drops = tuple(draw.sample(range(RECORDS), draw.randrange(4)))
    return Step(puts, drops)


def states(seed: int, start: State, first: int, last: int) -> Iterator[State]:
    """Yield the state before step `first` and after each step up to and without `last`."""
    yield start
    for number in range(first, last):
        start = step(seed, number).applied(start)
        yield start


def run(
    environment: Environment, seed: int, numbers: Iterator[int], report: Callable[[str, int], None]
) -> None:
    """Write steps, saying `begin`, `ack` and now and then `sync` with the number of the step."""
    for number in numbers:
        records, drops = step(seed, number).records(), step(seed, number).drops
        report("begin", number)
        environment.write(records, [key_of(index) for index in drops])
        report("ack", number)
        if number % SYNC_EVERY == SYNC_EVERY - 1:
            environment.sync()
            report("sync", number)


def observed(environment: Environment) -> State:
    """Return what is there; a record with wrong bytes has version -1.

    Raises:
        Corrupt: a record with parts missing.
    """
    state: State = {}
    for index in range(RECORDS):
        found = environment.read(key_of(index))
        if found is not None:
            version = version_of(key_of(index), *found)
            state[index] = (-1 if version is None else version, len(found[1]))
    return state


def footprint_of(state: State) -> int:
    """Return what an environment with these records must count as used."""
    return sum(seal(key_of(index), *record).footprint for index, record in state.items())
