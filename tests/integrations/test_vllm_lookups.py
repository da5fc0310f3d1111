"""What a tier says of a chunk while the daemon answers, is silent, forgets or fails."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtcd.core.keys import EngineKey
from kvtcd.integrations.vllm_lookups import Answer, Lookups

KEY, OTHER = EngineKey(b"a" * 36), EngineKey(b"b" * 36)
PATIENCE = 2.0


def test_an_answer_is_waited_for_and_then_stays() -> None:
    lookups = Lookups(PATIENCE)

    assert lookups.ask(KEY, "r", 0.0) is Answer.RETRY
    assert lookups.take(0.0) == (KEY,)
    assert lookups.ask(KEY, "r", 0.1) is Answer.RETRY
    assert lookups.take(0.1) == ()  # asked once, however often vLLM asks

    lookups.learn({KEY: True})
    assert lookups.ask(KEY, "r", 0.2) is Answer.HIT
    assert lookups.counts == {"hit": 1}


def test_silence_is_a_miss_after_a_while_and_never_waited_for_twice() -> None:
    """VLLM has no deadline for RETRY: a daemon that hangs would hang the requests with it."""
    lookups = Lookups(PATIENCE)
    lookups.ask(KEY, "r", 10.0)
    lookups.take(10.0)

    assert lookups.ask(KEY, "r", 11.9) is Answer.RETRY
    assert lookups.ask(KEY, "r", 12.0) is Answer.MISS
    assert lookups.ask(OTHER, "s", 12.1) is Answer.MISS  # nobody else waits as long again
    assert lookups.counts == {"late": 2}

    lookups.learn({KEY: True})  # the daemon is back
    assert lookups.ask(OTHER, "t", 12.2) is Answer.RETRY
    assert lookups.ask(KEY, "t", 12.2) is Answer.HIT


def test_a_chunk_that_could_not_be_loaded_is_not_tried_for_ever() -> None:
    """A failed promotion returns to the scheduler, which looks up again: a hit then would be a livelock."""
    lookups = Lookups(PATIENCE)
    lookups.ask(KEY, "r", 0.0)
    lookups.take(0.0)
    lookups.learn({KEY: True})
    lookups.lost([KEY])

    lookups.learn({KEY: True})
    assert lookups.ask(KEY, "r", 0.1) is Answer.MISS
    assert lookups.ask(KEY, "s", 0.2) is Answer.RETRY  # another request: asked anew
    assert lookups.take(0.2) == (KEY,)


def test_a_miss_is_asked_anew_for_another_request_only() -> None:
    lookups = Lookups(PATIENCE)
    lookups.ask(KEY, "r", 0.0)
    lookups.take(0.0)
    lookups.learn({KEY: False})

    assert lookups.ask(KEY, "r", 0.1) is Answer.MISS
    assert lookups.take(0.1) == ()
    assert lookups.ask(KEY, "s", 0.2) is Answer.RETRY
    assert lookups.take(0.2) == (KEY,)


def test_what_was_stored_meanwhile_is_there() -> None:
    lookups = Lookups(PATIENCE)
    lookups.ask(KEY, "r", 0.0)
    lookups.take(0.0)
    lookups.learn({KEY: False})
    lookups.stored([KEY, OTHER])

    assert lookups.ask(KEY, "s", 0.1) is Answer.HIT


def test_after_a_restart_of_the_daemon_everything_is_asked_anew() -> None:
    lookups = Lookups(PATIENCE)
    lookups.ask(KEY, "r", 0.0)
    lookups.take(0.0)
    lookups.learn({KEY: True})

    lookups.forget()
    assert lookups.ask(KEY, "r", 1.0) is Answer.RETRY
    assert lookups.take(1.0) == (KEY,)
    assert lookups.ask(KEY, "r", PATIENCE) is Answer.MISS  # but nobody waits longer for that


def test_nothing_is_kept_of_requests_that_ended() -> None:
    """A lookup that hits and is never used must leave nothing behind."""
    lookups = Lookups(PATIENCE)
    for request in ("r", "s"):
        lookups.ask(KEY, request, 0.0)
    lookups.finished("r")
    assert len(lookups) == 1
    lookups.finished("s")
    lookups.finished("never seen")

    assert len(lookups) == 0
    assert lookups.take(0.0) == ()
    lookups.learn({KEY: True})  # comes too late for anybody
    assert len(lookups) == 0


def test_what_is_known_to_be_there() -> None:
    lookups = Lookups(1.0)
    key = EngineKey(b"k" * 36)
    assert lookups.known(key, "r", 0.0) is not Answer.HIT
    lookups.ask(key, "r", 0.0)
    assert lookups.known(key, "r", 0.0) is not Answer.HIT
    lookups.learn({key: True})
    assert lookups.known(key, "r", 0.0) is Answer.HIT
    lookups.lost([key])
    assert lookups.known(key, "r", 0.0) is not Answer.HIT


def test_what_is_known_is_awaited_no_longer_than_an_answer_and_asks_for_nothing() -> None:
    lookups = Lookups(PATIENCE)
    assert lookups.known(KEY, "r", 0.0) is Answer.MISS, "who has not asked does not wait"
    lookups.ask(KEY, "r", 0.0)
    assert lookups.known(KEY, "r", 1.9) is Answer.RETRY
    assert lookups.known(KEY, "s", 1.9) is Answer.MISS
    assert lookups.known(KEY, "r", 2.0) is Answer.MISS
    assert (len(lookups), lookups.counts) == (1, {})


def test_what_was_stored_since_it_was_looked_for_is_there_whatever_the_answer() -> None:
    lookups = Lookups(PATIENCE)
    lookups.ask(KEY, "r", 0.0)
    lookups.take(0.0)
    lookups.stored([KEY])
    lookups.learn({KEY: False})
    assert lookups.ask(KEY, "r", 0.1) is Answer.HIT


class LookupHistories(RuleBasedStateMachine):
    """Any order of events: nobody waits longer than patience, and nothing is kept for ever."""

    keys = st.sampled_from([EngineKey(bytes([i]) * 36) for i in range(3)])
    requests = st.sampled_from(["r", "s"])

    def __init__(self) -> None:
        super().__init__()
        self.lookups = Lookups(PATIENCE)
        self.now = 0.0
        self.asked: list[EngineKey] = []
        self.waiting: dict[tuple[EngineKey, str], float] = {}

    @rule(key=keys, request=requests)
    def ask(self, key: EngineKey, request: str) -> None:
        answer = self.lookups.ask(key, request, self.now)
        if answer is Answer.RETRY:
            since = self.waiting.setdefault((key, request), self.now)
            assert self.now - since < PATIENCE

    @rule(seconds=st.sampled_from([0.1, 1.0, PATIENCE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def end_of_step(self) -> None:
        self.asked += self.lookups.take(self.now)

    @precondition(lambda self: self.asked)
    @rule(there=st.booleans())
    def answer(self, there: bool) -> None:
        self.lookups.learn({self.asked.pop(0): there})

    @rule(key=keys)
    def lose(self, key: EngineKey) -> None:
        self.lookups.lost([key])

    @rule()
    def restart(self) -> None:
        self.lookups.forget()

    @rule(request=requests)
    def finish(self, request: str) -> None:
        self.lookups.finished(request)
        self.waiting = {pair: since for pair, since in self.waiting.items() if pair[1] != request}

    @invariant()
    def bounded(self) -> None:
        assert len(self.lookups) <= 3


TestLookupHistories = LookupHistories.TestCase
TestLookupHistories.settings = settings(max_examples=60, stateful_step_count=30)
