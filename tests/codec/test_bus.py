"""The order of what a device is told: a part is copied behind what computes it, and beside what follows."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvtcd.codec import staged
from kvtcd.codec.bus import Bus
from kvtcd.codec.ports import BlobDecoder
from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator, StagedDecoder

CPU = torch.device("cpu")


@pytest.fixture
def told(monkeypatch):
    """What streams are told, in the order of telling: (stream, what)."""
    log: list[tuple[str, str]] = []
    current = ["compute"]

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event) -> None:
            log.append((self.name, f"wait for {event.of} {event.at}"))

    class Event:
        def record(self, stream) -> None:
            self.of, self.at = stream.name, sum(name == stream.name for name, _ in log)

    @contextmanager
    def within(stream):
        current.append(stream.name)
        yield
        current.pop()

    stand_ins = {
        "Stream": lambda _: Stream("bus"), "Event": Event, "stream": within,
        "current_stream": lambda _: Stream(current[-1]),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    copy = torch.Tensor.copy_

    def noted(target, source, non_blocking=False):
        assert non_blocking
        log.append((current[-1], f"copy {int(source[0])}"))
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    return SimpleNamespace(log=log, compute=lambda what: log.append((current[-1], what)))


class ByPart(BlobDecoder):
    """Fills parts of four bytes with their number."""

    def __init__(self, told) -> None:
        self._told = told

    def parts(self, _symbols, out, _nbytes):
        for number in range(3):
            self._told.compute(f"decode {number}")
            out[4 * number : 4 * number + 4] = number
            yield (slice(4 * number, 4 * number + 2), slice(4 * number + 2, 4 * number + 4))


def test_each_part_is_copied_behind_its_event_beside_the_next(told):
    out = torch.full((12,), 0xEE, dtype=torch.uint8)
    StagedDecoder(ByPart(told), Accelerator(CPU, bus=Bus(CPU)), None).synthesize(None, out)

    assert out.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert told.log == [
        ("compute", "decode 0"),
        ("bus", "wait for compute 1"), ("bus", "copy 0"), ("bus", "copy 0"),
        ("compute", "decode 1"),
        ("bus", "wait for compute 2"), ("bus", "copy 1"), ("bus", "copy 1"),
        ("compute", "decode 2"),
        ("bus", "wait for compute 3"), ("bus", "copy 2"), ("bus", "copy 2"),
        ("compute", "wait for bus 9"),
    ]  # fmt: skip


def test_what_is_told_after_a_failure_waits_for_copies_as_well(told):
    """Whoever comes next may be given the memory that a copy still reads."""

    class Fails(ByPart):
        def parts(self, symbols, out, nbytes):
            yield next(super().parts(symbols, out, nbytes))
            raise ZeroDivisionError

    decoder = StagedDecoder(Fails(told), Accelerator(CPU, bus=Bus(CPU)), None)
    with pytest.raises(ZeroDivisionError):
        decoder.synthesize(None, torch.empty(12, dtype=torch.uint8))

    assert told.log[-1] == ("compute", "wait for bus 3")


def test_nothing_is_given_up_before_the_device_is_done_with_it(monkeypatch):
    log, device, other = [], torch.device("cuda", 1), torch.device("cuda", 0)
    streams = {
        where: SimpleNamespace(synchronize=partial(log.append, f"wait for {where}"))
        for where in (device, other)
    }
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: streams[where])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("give back to CUDA"))
    residency = Residency()
    monkeypatch.setattr(residency, "drop_unused", lambda where: log.append(f"drop bases of {where}"))
    Accelerator(device, residency=residency).relieve()

    assert log == ["wait for cuda:1", "drop bases of cuda:1", "give back to CUDA"]


def test_without_a_bus_all_is_told_to_one_stream(told):
    out = torch.full((12,), 0xEE, dtype=torch.uint8)
    StagedDecoder(ByPart(told), Accelerator(CPU), None).synthesize(None, out)

    assert {name for name, _ in told.log} == {"compute"}
    assert [what for _, what in told.log if what.startswith("decode")] == ["decode 0", "decode 1", "decode 2"]


def test_parts_are_as_large_as_the_bus_needs(told):
    asked = []

    class Asked(ByPart):
        def parts(self, symbols, out, nbytes):
            asked.append(nbytes)
            return super().parts(symbols, out, nbytes)

    StagedDecoder(Asked(told), Accelerator(CPU), None).synthesize(None, torch.empty(12, dtype=torch.uint8))
    assert asked == [staged.PART_BYTES]
