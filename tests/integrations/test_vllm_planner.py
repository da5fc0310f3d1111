"""What each step loads and stores, as vLLM's scheduler asks for it; a dict stands for the daemon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.core.keys import EngineKey
from kvtcd.integrations.vllm_lookups import Answer
from kvtcd.integrations.vllm_planner import Planner
from kvtcd.integrations.vllm_steps import Sent, Step

CHUNK, BLOCK = 8, 2
PER_CHUNK = CHUNK // BLOCK
HIT, MISS, RETRY = Answer.HIT, Answer.MISS, Answer.RETRY


class Scripted:
    """A finder that knows its answers; whatever it was not told is a miss."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Answer] = {}
        self.daemon = SimpleNamespace(link=SimpleNamespace(away=False))
        self.sent = 0
        self.gone: list[str] = []

    def ask(self, key: bytes, request: str) -> Answer:  # noqa: ARG002 - a finder's name
        return self.answers.get(key, MISS)

    def send(self) -> None:
        self.sent += 1

    def known(self, key: EngineKey, request: str) -> Answer:  # noqa: ARG002 - a finder's name
        return self.answers.get(key, MISS)

    def stored(self, keys: Any) -> None:
        self.answers.update(dict.fromkeys(keys, HIT))

    def lost(self, keys: Any) -> None:
        self.answers.update(dict.fromkeys(keys, MISS))

    def finished(self, request: str) -> None:
        self.gone.append(request)


class Request:
    """A request of vLLM's scheduler whose blocks are numbered from `at`."""

    def __init__(self, name: str, tokens: int, at: int = 100, prefix: str = "") -> None:
        self.request_id, self.num_prompt_tokens = name, tokens
        self.block_hashes = [f"{prefix or name}{i}".encode().ljust(32, b".") for i in range(tokens // BLOCK)]
        self.blocks = list(range(at, at + -(-tokens // BLOCK)))

    def key(self, chunk: int) -> EngineKey:
        return EngineKey(self.block_hashes[(chunk + 1) * PER_CHUNK - 1] + bytes(4))


def scheduled(new: Any = (), running: Any = (), **tokens: int) -> SimpleNamespace:
    """A step: new requests with their computed tokens, running ones with those and their new blocks."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r.request_id, block_ids=(r.blocks,), num_computed_tokens=computed)
            for r, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r, *_ in running],
            num_computed_tokens=[computed for _, computed, *_ in running],
            new_block_ids=[(blocks,) if blocks else None for _, _, blocks, *_ in running],
            resumed_req_ids={r.request_id for r, _, _, *resumed in running if resumed},
        ),
        num_scheduled_tokens=tokens,
    )


@pytest.fixture
def finder() -> Scripted:
    return Scripted()


@pytest.fixture
def planner(finder: Scripted) -> Planner:
    return Planner(finder, chunk=CHUNK, block=BLOCK, hashed=BLOCK, slots=3)


def there(finder: Scripted, request: Request, *answers: Answer) -> None:
    finder.answers |= {request.key(chunk): answer for chunk, answer in enumerate(answers)}


@pytest.mark.parametrize(
    ("tokens", "answers", "computed", "expected"),
    [
        (20, [HIT, HIT], 0, 16),
        (20, [HIT, MISS], 0, 8),
        (20, [MISS, HIT], 0, 0),
        (20, [HIT, RETRY], 0, None),
        (20, [MISS, RETRY], 0, 0),  # what comes after a miss is not waited for
        (20, [RETRY, HIT], 8, 8),  # nor what is computed already
        (16, [HIT, HIT], 0, 14),  # a token is left to be computed, and its block with it
        (17, [HIT, HIT], 0, 16),
        (20, [HIT, HIT], 4, 12),  # the rest of a chunk that is there in part
        (20, [HIT, HIT], 16, 0),
        (7, [], 0, 0),
        (40, [HIT] * 5, 0, 24),  # no more than there is memory for
    ],
)
def test_how_many_tokens_can_be_loaded(finder, planner, tokens, answers, computed, expected) -> None:
    request = Request("r", tokens)
    there(finder, request, *answers)

    assert planner.matched(request, computed) == expected
    assert planner.matched(request, computed) == expected  # asked again it says the same
    assert finder.sent == 2


def test_a_step_loads_what_was_allocated_and_stores_what_is_missing(finder, planner) -> None:
    request = Request("r", 26)
    there(finder, request, HIT, HIT)
    assert planner.matched(request, 4) == 12
    planner.allocated(request, 12)
    step = planner.step(scheduled(new=[(request, 16)], r=10))

    first, second = step.loads
    assert (first.key, first.first, first.parent) == (request.key(0), 0, None)
    assert (first.blocks, first.skip) == ((102, 103), 2)
    assert (second.key, second.first, second.parent) == (request.key(1), 8, request.key(0))
    assert (second.blocks, second.skip) == ((104, 105, 106, 107), 0)
    (stored,) = step.stores
    assert (stored.key, stored.first, stored.parent) == (request.key(2), 16, request.key(1))
    assert stored.blocks == (108, 109, 110, 111)
    assert planner.step(scheduled(running=[(request, 26, [])], r=1)).stores == ()  # once


def test_a_chunk_is_stored_by_the_step_that_completes_it(planner) -> None:
    request = Request("r", 26)
    planner.matched(request, 0)
    request.blocks, later = request.blocks[:5], request.blocks[5:]

    assert planner.step(scheduled(new=[(request, 0)], r=7)).stores == ()
    (first,) = planner.step(scheduled(running=[(request, 7, [])], r=3)).stores
    assert first.key == request.key(0)
    second, third = planner.step(scheduled(running=[(request, 10, later)], r=16)).stores
    assert (second.key, third.key) == (request.key(1), request.key(2))
    assert third.blocks == (108, 109, 110, 111)
    # nothing of the answer
    assert planner.step(scheduled(running=[(request, 26, [200, 201, 202, 203])], r=8)).stores == ()


def test_a_preempted_request_has_other_blocks(finder, planner) -> None:
    request = Request("r", 20)
    planner.matched(request, 0)
    planner.step(scheduled(new=[(request, 0)], r=6))
    there(finder, request, HIT)
    assert planner.matched(request, 0) == 8
    planner.allocated(request, 8)
    moved = list(range(300, 310))
    step = planner.step(scheduled(running=[(request, 8, moved, True)], r=12))

    assert [move.blocks for move in step.loads] == [(300, 301, 302, 303)]
    assert [move.blocks for move in step.stores] == [(304, 305, 306, 307)]


def test_what_was_not_loaded_is_stored_once_it_is_computed(finder, planner) -> None:
    request = Request("r", 26)
    there(finder, request, HIT, HIT, HIT)
    planner.matched(request, 0)
    planner.allocated(request, 24)
    first = planner.step(scheduled(new=[(request, 24)], r=2))
    assert (len(first.loads), first.failures) == (3, 0)
    planner.failed({105})  # of the second chunk
    step = planner.step(scheduled(running=[(request, 10, [])], r=16))

    assert step.loads == ()
    assert step.failures == 1
    assert [move.key for move in step.stores] == [request.key(1)]  # the third one is there
    assert finder.answers[request.key(1)] is MISS
    planner.failed(())  # a step in which nothing went wrong
    assert planner.step(scheduled(running=[(request, 26, [])], r=1)).failures == 1


def test_who_shares_a_block_that_was_not_loaded_stores_anew_too(finder, planner) -> None:
    one, two = Request("a", 12, prefix="p"), Request("b", 20, prefix="p")
    there(finder, two, HIT)
    planner.matched(one, 0)
    planner.allocated(one, 8)
    planner.matched(two, 8)
    planner.step(scheduled(new=[(one, 8), (two, 8)], a=4, b=12))
    planner.failed(one.blocks[:1])
    finder.answers[two.key(0)] = HIT  # computed and stored by the other

    step = planner.step(scheduled(running=[(two, 0, [])], b=20))
    assert [move.key for move in step.stores] == [two.key(1)]


def test_two_requests_do_not_store_the_same_chunk_at_once(planner) -> None:
    one, two = Request("a", 10, prefix="p"), Request("b", 10, at=200, prefix="p")
    planner.matched(one, 0)
    planner.matched(two, 0)
    step = planner.step(scheduled(new=[(one, 0), (two, 0)], a=10, b=10))

    assert [move.blocks for move in step.stores] == [(100, 101, 102, 103)]
    assert not planner.finished("a", one.blocks)
    three = Request("c", 10, at=300, prefix="p")
    planner.matched(three, 0)
    assert planner.step(scheduled(new=[(three, 0)], c=10)).stores == (), "it is still on its way"
    planner.sent(Sent(frozenset({one.key(0)})))  # the daemon has not taken it
    four = Request("d", 10, at=400, prefix="p")
    planner.matched(four, 0)
    assert [move.blocks for move in planner.step(scheduled(new=[(four, 0)], d=10)).stores] == [
        (400, 401, 402, 403)
    ]
    planner.sent(Sent(frozenset({one.key(0)}), there=frozenset({one.key(0)})))
    five = Request("e", 10, at=500, prefix="p")
    planner.matched(five, 8)
    assert planner.step(scheduled(new=[(five, 8)], e=2)).stores == ()


def covered(planner: Planner, request: Request) -> None:
    """Schedule a request whose whole prompt but a token is in the engine's own cache."""
    done = request.num_prompt_tokens - 1
    assert planner.matched(request, done) == 0
    assert planner.step(scheduled(new=[(request, done)], **{request.request_id: 1})).stores == ()


def test_what_the_engine_has_cached_waits_for_the_answer_and_is_sent_only_if_it_is_missing(
    finder, planner
) -> None:
    request = Request("r", 25)
    there(finder, request, RETRY, RETRY, RETRY)
    covered(planner, request)
    there(finder, request, HIT, RETRY, MISS)
    assert planner.step(scheduled(running=[(request, 25, [])], r=1)).stores == ()
    there(finder, request, HIT, HIT, MISS)
    (missing,) = planner.step(scheduled(running=[(request, 26, [])], r=1)).stores
    assert (missing.key, missing.parent) == (request.key(2), request.key(1))
    assert missing.blocks == (108, 109, 110, 111)
    assert not planner.finished("r", request.blocks)
    assert len(planner) == 0


@pytest.mark.parametrize(("answer", "sent"), [(HIT, 0), (MISS, 1)])
def test_a_request_that_ends_before_the_answer_keeps_its_blocks_until_then(
    finder, planner, answer, sent
) -> None:
    request, nothing = Request("r", 9), scheduled()
    there(finder, request, RETRY)
    covered(planner, request)
    assert planner.finished("r", request.blocks)
    assert planner.step(nothing) == Step()
    there(finder, request, answer)
    step = planner.step(nothing)

    assert [move.blocks for move in step.stores] == [(100, 101, 102, 103)] * sent
    assert step.released == ("r",)
    assert (planner.step(nothing), len(planner), finder.gone) == (Step(), 0, ["r"])


def test_what_is_known_to_be_there_or_cannot_be_asked_for_holds_no_block(finder, planner) -> None:
    for number, (answer, away) in enumerate(((HIT, False), (RETRY, True))):
        request = Request(f"r{number}", 9)
        there(finder, request, RETRY)
        covered(planner, request)
        there(finder, request, answer)
        finder.daemon.link.away = away
        assert not planner.finished(request.request_id, request.blocks)
    assert len(planner) == 0


def test_a_daemon_that_goes_away_lets_blocks_go(finder, planner) -> None:
    request = Request("r", 9)
    there(finder, request, RETRY)
    covered(planner, request)
    assert planner.finished("r", request.blocks)
    finder.daemon.link.away = True
    assert planner.step(scheduled()) == Step(released=("r",))


def test_blocks_that_are_gone_or_wrong_are_never_sent(finder, planner) -> None:
    """A preempted request ends without blocks; of one that ended, blocks turn out not to have been loaded."""
    preempted, wrong = Request("a", 17), Request("b", 17, at=200)
    for request in (preempted, wrong):
        there(finder, request, RETRY, RETRY)
        covered(planner, request)
    assert not planner.finished("a", [])
    assert planner.finished("b", wrong.blocks)
    planner.failed({wrong.blocks[PER_CHUNK]})
    there(finder, wrong, MISS, MISS)
    step = planner.step(scheduled())
    assert [move.key for move in step.stores] == [wrong.key(0)]
    assert step.released == ("b",)


def breaks_once(finder: Scripted, method: str, monkeypatch) -> None:
    whole, calls = getattr(finder, method), iter(range(10**6))

    def breaks(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError(method)
        return whole(*arguments)

    monkeypatch.setattr(finder, method, breaks)


@pytest.mark.parametrize("method", ["send", "known", "finished"])
def test_a_plan_that_fails_in_part_releases_every_request_it_held(finder, planner, monkeypatch, method):
    requests = [Request("a", 16), Request("b", 16, at=200)]
    for request in requests:
        there(finder, request, RETRY, RETRY)
        planner.arrived(request)
        planner.step(scheduled([(request, 0)], **{request.request_id: 16}))
        assert planner.finished(request.request_id, request.blocks)
    for request in requests:
        there(finder, request, MISS, MISS)
    breaks_once(finder, method, monkeypatch)

    planned = planner.step(scheduled())

    assert planned.released == ("a", "b")
    assert {move.key for move in planned.stores} >= {requests[1].key(0), requests[1].key(1)}
    assert (planner.step(scheduled()), len(planner)) == (Step(), 0)
    planner.sent(Sent(frozenset(move.key for move in planned.stores)))
    assert not planner._storing, "no chunk is thought to be on its way"


@pytest.mark.parametrize("method", ["send", "known"])
def test_a_request_whose_end_fails_is_forgotten_and_keeps_nothing(finder, planner, monkeypatch, method):
    request = Request("a", 16)
    there(finder, request, RETRY, RETRY)
    planner.arrived(request)
    planner.step(scheduled([(request, 0)], a=16))
    breaks_once(finder, method, monkeypatch)

    assert not planner.finished("a", request.blocks)
    assert (len(planner), finder.gone) == (0, ["a"])
    assert planner.step(scheduled()) == Step()


def test_a_plan_that_fails_while_blocks_are_promised_says_so(finder, planner, monkeypatch) -> None:
    request = Request("r", 20)
    there(finder, request, HIT, HIT)
    assert planner.matched(request, 0) == 16
    planner.allocated(request, 16)
    monkeypatch.setattr(planner, "_to_load", lambda _known: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        planner.step(scheduled([(request, 0)], r=20))
    assert planner.promised


def test_hashes_that_are_no_digests_are_never_sent(planner) -> None:
    request = Request("r", 10)
    request.block_hashes = [one[:8] for one in request.block_hashes]
    planner.matched(request, 0)
    assert planner.step(scheduled(new=[(request, 0)], r=10)).stores == ()
    assert not planner.finished("r", request.blocks)


def test_nothing_is_taken_for_a_daemon_that_is_away(finder, planner) -> None:
    request = Request("r", 10)
    finder.daemon.link.away = True
    planner.matched(request, 0)
    assert planner.step(scheduled(new=[(request, 0)], r=10)).stores == ()


def test_memory_is_shared_by_the_requests_of_one_step(finder, planner) -> None:
    one, two = Request("a", 20), Request("b", 40, at=200)
    there(finder, one, HIT, HIT)
    there(finder, two, *[HIT] * 5)
    assert planner.matched(one, 0) == 16
    planner.allocated(one, 16)
    assert planner.promised
    assert planner.matched(two, 0) == 8
    planner.allocated(two, 8)
    assert len(planner.step(scheduled(new=[(one, 16), (two, 8)], a=4, b=32)).loads) == 3
    assert not planner.promised
    assert planner.matched(two, 8) == 24  # the next step has all of it again


def test_finished_requests_are_forgotten(finder, planner) -> None:
    for name in "abc":
        planner.arrived(Request(name, 20))
    for name in "abcd":
        assert not planner.finished(name, [])
    assert len(planner) == 0
    assert finder.gone == ["a", "b", "c"]


def test_hashes_of_less_than_a_block() -> None:
    finder = Scripted()
    planner = Planner(finder, chunk=8, block=4, hashed=2, slots=9)
    request = Request("r", 17)
    there(finder, request, HIT, HIT)
    assert planner.matched(request, 0) == 16


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    hits=st.lists(st.sampled_from([HIT, MISS]), min_size=8, max_size=8),
    pieces=st.lists(st.integers(1, 9), min_size=40, max_size=40),
)
def test_every_missing_chunk_is_stored_once_whatever_the_steps(prompts, hits, pieces) -> None:
    """Chunked prefill of several prompts: after it the daemon has each whole chunk of each prompt."""
    finder = Scripted()
    planner = Planner(finder, chunk=CHUNK, block=BLOCK, hashed=BLOCK, slots=4)
    requests = [Request(f"r{i}", tokens, at=1000 * i) for i, tokens in enumerate(prompts)]
    stored: list[bytes] = []
    for request in requests:
        chunks = request.num_prompt_tokens // CHUNK
        there(finder, request, *hits[:chunks])
        done = planner.matched(request, 0)
        planner.allocated(request, done)
        assert done < request.num_prompt_tokens
        new = [(request, done)]
        for piece in pieces:
            if done >= request.num_prompt_tokens:
                break
            running = [] if new else [(request, done, [])]
            piece = min(piece, request.num_prompt_tokens - done)  # noqa: PLW2901 - the end of the prompt
            step = planner.step(scheduled(new, running, **{request.request_id: piece}))
            new, done = [], done + piece
            for move in step.stores:
                assert move.first + CHUNK <= done
                at = move.first // BLOCK
                assert list(move.blocks) == request.blocks[at : at + PER_CHUNK]
            stored += [move.key for move in step.stores]
        if done >= request.num_prompt_tokens:
            whole = {request.key(chunk) for chunk in range(chunks)}
            assert whole <= set(stored) | {key for key, a in finder.answers.items() if a is HIT}
    assert len(stored) == len(set(stored))
