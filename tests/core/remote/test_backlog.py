"""The queue against a list: nothing is lost but what is said to be, and its bytes are those of its items."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtcd.core.remote.backlog import Backlog, Offer, Waiting

CAPACITY, ATTEMPTS = 20, 3
NAMES = [f"{space}/{number}" for space in "ab" for number in range(4)]


class Queue(RuleBasedStateMachine):
    """Items are offered, taken, written, tried again and forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.backlog: Backlog[str] = Backlog(CAPACITY, attempts=ATTEMPTS)
        self.waiting: list[Waiting[str]] = []
        self.taken: list[Waiting[str]] = []
        self.aside: list[Waiting[str]] = []
        self.done = 0
        self.stale: list[Waiting[str]] = []
        """What was taken and then forgotten or given back: whoever took it does not know yet."""

    @rule(name=st.sampled_from(NAMES), nbytes=st.integers(1, 12))
    def offer(self, name: str, nbytes: int) -> None:
        outcome = self.backlog.offer(name, nbytes, f"{name} of {nbytes}")
        known = [one.name for one in (*self.waiting, *self.taken, *self.aside)]
        size = sum(one.nbytes for one in (*self.waiting, *self.taken, *self.aside))
        if name in known:
            assert outcome is Offer.KNOWN
        elif size + nbytes > CAPACITY:
            assert outcome is Offer.FULL
        else:
            assert outcome is Offer.TAKEN
            self.waiting.append(Waiting(name, nbytes, f"{name} of {nbytes}"))

    @rule(most=st.integers(1, 4), nbytes=st.integers(1, 20))
    def take(self, most: int, nbytes: int) -> None:
        taken = self.backlog.take(most=most, nbytes=nbytes)
        assert taken == self.waiting[: len(taken)], "the oldest, in order"
        assert len(taken) <= most
        assert sum(one.nbytes for one in taken) <= nbytes or len(taken) == 1
        if self.waiting and len(taken) < min(most, len(self.waiting)):
            assert sum(one.nbytes for one in self.waiting[: len(taken) + 1]) > nbytes, "no fewer than fit"
        del self.waiting[: len(taken)]
        self.taken += taken

    @precondition(lambda self: self.taken or self.stale)
    @rule(data=st.data())
    def settled(self, data) -> None:
        one = data.draw(st.sampled_from(self.taken + self.stale))
        wanted = self.under_way(one)
        assert self.backlog.settled(one) == wanted
        self.done += wanted
        self.drop(one)

    @precondition(lambda self: self.taken or self.stale)
    @rule(data=st.data(), own=st.booleans())
    def again(self, data, own: bool) -> None:
        one = data.draw(st.sampled_from(self.taken + self.stale))
        comes_back = self.under_way(one) and one.refused + own < ATTEMPTS
        assert self.backlog.wants(one) == self.under_way(one)
        assert self.backlog.alone(one) == (one.failed is not None and self.done > one.failed)
        assert self.backlog.again(one, own=own) == comes_back
        if comes_back:
            self.aside.append(Waiting(one.name, one.nbytes, one.item, one.refused + own, self.done))
        self.drop(one)
        if comes_back:
            self.stale.append(one)

    @rule()
    def resume(self) -> None:
        self.backlog.resume()
        self.waiting = self.aside + self.waiting
        self.aside = []

    def under_way(self, one: Waiting[str]) -> bool:
        return any(one is each for each in self.taken)

    def drop(self, one: Waiting[str]) -> None:
        self.taken = [each for each in self.taken if each is not one]
        self.stale = [each for each in self.stale if each is not one]

    @rule(space=st.sampled_from("ab"))
    def discard(self, space: str) -> None:
        doomed = [one for one in (*self.waiting, *self.taken, *self.aside) if one.name.startswith(space)]
        assert self.backlog.discard(lambda name: name.startswith(space)) == len(doomed)
        self.stale += [one for one in self.taken if one in doomed]
        self.waiting = [one for one in self.waiting if one not in doomed]
        self.aside = [one for one in self.aside if one not in doomed]
        self.taken = [one for one in self.taken if one not in doomed]

    @invariant()
    def sums(self) -> None:
        everything = (*self.waiting, *self.taken, *self.aside)
        assert self.backlog.nbytes == sum(one.nbytes for one in everything) <= CAPACITY
        assert len(self.backlog) == len(self.waiting) + len(self.taken) + len(self.aside)
        assert self.backlog.aside == len(self.aside)


TestQueue = Queue.TestCase
