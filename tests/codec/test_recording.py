"""CUDA graphs are captured as torch and CUDA ask for: the calls, in order, on a scripted torch."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from kvtcd.codec import recording
from kvtcd.codec.recording import ALONE, CudaTapes

DEVICE = torch.device("cuda", 3)
POOL = (0, 7)


class Script:
    """Torch's part: notes what it is told; `end` is raised where a capture ends."""

    def __init__(self) -> None:
        self.told, self.stream, self.end, self.begin = [], 5, None, None

    def graph(self):
        script = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode) -> None:
                assert ALONE.locked()
                script.told.append(("begin", pool, capture_error_mode))
                if script.begin:
                    raise script.begin

            def capture_end(self) -> None:
                assert ALONE.locked()
                script.told.append("end")
                if script.end:
                    raise script.end

            def replay(self) -> None:
                script.told.append(("replay", script.parts.index(self)))

        made = Graph()
        self.parts.append(made)
        return made

    parts: list = []  # noqa: RUF012 - anew for each test


@pytest.fixture
def script(monkeypatch):
    script = Script()
    script.parts = []
    for name, stand_in in {
        "CUDAGraph": script.graph,
        "graph_pool_handle": lambda: POOL,
        "current_stream": lambda _: SimpleNamespace(cuda_stream=script.stream),
        "memory_snapshot": lambda pool: (
            [{"total_size": 2 << 20}, {"total_size": 20 << 20}] if pool == POOL else []
        ),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *given, name=name: script.told.append((name, *given)), raising=False
        )
    return script


def test_a_lane_is_a_stream_but_not_the_default_one(script):
    tapes = CudaTapes(DEVICE)
    assert tapes.lane() == 5
    script.stream = 0
    assert tapes.lane() is None


def test_parts_are_captured_into_one_pool_and_other_threads_may_launch(script):
    tape = CudaTapes(DEVICE).tape()
    for _ in range(2):
        with tape.recording():
            script.told.append("work")
    tape.replay(1)
    tape.replay(0)
    assert script.told == [("begin", POOL, "thread_local"), "work", "end"] * 2 + [
        ("replay", 1),
        ("replay", 0),
    ]
    assert tape.nbytes == 22 << 20
    assert not ALONE.locked()


GONE = [("_cuda_endAllocateToPool", 3, POOL), ("_cuda_releasePool", 3, POOL)]


@pytest.mark.parametrize("where", ["begin", "end"])
def test_after_a_failed_capture_the_allocator_is_told_that_it_has_ended(script, where):
    setattr(script, where, RuntimeError("operation failed due to a previous error during capture"))
    tape = CudaTapes(DEVICE).tape()
    with pytest.raises(RuntimeError, match="previous error"), tape.recording():
        pass
    assert script.told[-2:] == GONE
    assert not ALONE.locked()


def test_what_fails_while_it_is_captured_ends_the_capture_and_says_what_it_was(script):
    tape = CudaTapes(DEVICE).tape()
    with pytest.raises(torch.OutOfMemoryError), tape.recording():
        raise torch.OutOfMemoryError
    assert script.told == [("begin", POOL, "thread_local"), "end"], "torch knows that it has ended"


def test_an_allocator_that_knows_it_is_left_alone(script, monkeypatch):
    def knows(*_):
        raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", knows)
    script.begin = ValueError("another")
    with pytest.raises(ValueError, match="another"), CudaTapes(DEVICE).tape().recording():
        pass
    assert script.told == [("begin", POOL, "thread_local")]


def test_one_capture_at_a_time(script):
    tape, order = CudaTapes(DEVICE).tape(), []

    def other():
        with recording.CudaTape(DEVICE).recording():
            order.append("second")

    with tape.recording():
        thread = threading.Thread(target=other)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert [each for each in script.told if each == "end"] == ["end", "end"]
    assert script.told.index("end") < len(script.told) - 1 - script.told[::-1].index(
        ("begin", POOL, "thread_local")
    )


@pytest.mark.gpu
def test_a_card_goes_on_after_a_capture_that_failed():
    device = torch.device("cuda", 0)
    there = torch.ones(1 << 20, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        tape = CudaTapes(device).tape()
        with pytest.raises(RuntimeError), tape.recording():
            (there + 1).sum().item()
        torch.cuda.empty_cache()
        again = CudaTapes(device).tape()
        with again.recording():
            twice = there * 2
        again.replay(0)
        assert twice.sum().item() == 2 << 20
        assert again.nbytes >= 4 << 20
