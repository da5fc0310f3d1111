"""What is remembered of a store, against a dict with times that forgets nothing it must not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtcd.core.remote.presence import Presence

NAMES = ["a/1", "a/2", "b/1", "b/2", "c/1"]
CAPACITY, PRESENT_S, ABSENT_S = 3, 10.0, 2.0


class Memory(RuleBasedStateMachine):
    """Answers are noted, asked for and forgotten while time goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.presence = Presence(lambda: self.now, present_s=PRESENT_S, absent_s=ABSENT_S, capacity=CAPACITY)
        self.noted: dict[str, tuple[bool, float]] = {}
        self.order: list[str] = []
        """Names by their last use, the youngest last."""

    def use(self, name: str) -> None:
        self.order = [*(each for each in self.order if each != name), name]

    @rule(name=st.sampled_from(NAMES), there=st.booleans())
    def note(self, name: str, there: bool) -> None:
        self.presence.note(name, there=there)
        self.noted[name] = there, self.now + (PRESENT_S if there else ABSENT_S)
        self.use(name)
        while len(self.order) > CAPACITY:
            del self.noted[self.order.pop(0)]

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        there, until = self.noted.get(name, (None, 0.0))
        if name in self.noted and until <= self.now:
            del self.noted[name]
            self.order.remove(name)
            there = None
        assert self.presence.ask(name) is there
        if there is not None:
            self.use(name)

    @rule(prefix=st.sampled_from(["a/", "b/", "", "a/1"]))
    def forget(self, prefix: str) -> None:
        self.presence.forget(prefix)
        self.noted = {name: seen for name, seen in self.noted.items() if not name.startswith(prefix)}
        self.order = [name for name in self.order if name in self.noted]

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_is_bounded(self) -> None:
        assert len(self.presence) == len(self.noted) <= CAPACITY


TestMemory = Memory.TestCase
