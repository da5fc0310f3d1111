"""The breaker against what it promises: a dead store is asked seldom, one that is back is asked at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtcd.core.remote.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, BreakerState, pause


class Store(RuleBasedStateMachine):
    """Calls begin, end well, end badly or are given up, in any order; time goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(lambda: self.now, lambda: 0.5)
        self.under_way = 0
        self.in_a_row = 0
        self.opened_at: float | None = None

    @rule()
    def ask(self) -> None:
        before = self.breaker.state
        if self.breaker.admits():
            assert before is not BreakerState.OPEN, "a store that is left alone is not asked"
            self.under_way += 1
            if before is BreakerState.PROBING:
                assert not self.breaker.admits(), "one call finds out, no more"
        else:
            assert before is not BreakerState.CLOSED, "nothing is held back from a store that answers"

    @precondition(lambda self: self.under_way)
    @rule()
    def well(self) -> None:
        self.under_way -= 1
        self.in_a_row = 0
        self.breaker.succeeded()
        assert self.breaker.state is BreakerState.CLOSED
        assert self.breaker.wait == 0

    @precondition(lambda self: self.under_way)
    @rule()
    def badly(self) -> None:
        self.under_way -= 1
        self.in_a_row += 1
        self.breaker.failed()
        if self.in_a_row == FAILURES:
            assert self.breaker.state is BreakerState.OPEN
            assert FIRST_PAUSE_S / 2 <= self.breaker.wait <= LONGEST_PAUSE_S

    @precondition(lambda self: self.under_way)
    @rule()
    def given_up(self) -> None:
        self.under_way -= 1
        self.breaker.withdrawn()

    @rule(seconds=st.floats(0.01, 2 * LONGEST_PAUSE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def a_store_is_never_left_alone_for_ever(self) -> None:
        assert self.breaker.wait <= LONGEST_PAUSE_S
        assert (self.breaker.state is BreakerState.CLOSED) == (self.in_a_row < FAILURES)

    def teardown(self) -> None:
        while self.under_way:
            self.given_up()
        self.now += LONGEST_PAUSE_S
        assert self.breaker.admits(), "after the longest pause it is asked again"


TestStore = Store.TestCase


def opened(breaker: Breaker) -> None:
    for _ in range(FAILURES):
        assert breaker.admits()
        breaker.failed()


def test_pauses_double_until_the_longest_and_begin_anew_after_an_answer() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0], lambda: 0.0)  # no luck: half of each
    opened(breaker)
    waits = []
    for _ in range(9):
        waits.append(breaker.wait)
        now[0] += breaker.wait
        assert breaker.admits()
        breaker.failed()
    now[0] += breaker.wait
    assert breaker.admits()
    breaker.succeeded()
    opened(breaker)

    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert breaker.wait == 0.25
    assert breaker.opened == 2


def test_many_calls_that_fail_together_open_it_once_and_for_one_pause() -> None:
    breaker = Breaker(lambda: 0.0, lambda: 1.0)
    assert all(breaker.admits() for _ in range(100))
    for _ in range(100):
        breaker.failed()

    assert (breaker.opened, breaker.wait) == (1, FIRST_PAUSE_S)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_within_half_and_all_of_their_bound(attempt: int, luck: float) -> None:
    bound = min(60.0, 0.5 * 2.0 ** min(attempt - 1, 40))

    assert bound / 2 <= pause(attempt, 0.5, 60.0, lambda: luck) <= bound
