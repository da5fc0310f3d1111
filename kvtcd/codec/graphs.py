"""Work that recurs in shape: told to a device operation by operation a few times, then recorded and replayed.

A recording (on CUDA a graph, `recording`) reads and writes the addresses that it was made with. So what
differs between blocks is copied into inputs of its own before each replay, and what decides which operations
there are is its key; of other bases it is of no use. Each lane has recordings of its own: what one writes is
overwritten by its next replay, and by no other.

A recording is proved when it is made: replayed, it must write what the same operations wrote one by one, bit
for bit. A shape of which none can be had stays with operations one by one, and is counted.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kvtcd.codec.residency import Residency
from kvtcd.codec.stages import stage, unwatched
from kvtcd.codec.transform import Transform
from kvtcd.core.exhaustion import exhausted

_log = logging.getLogger(__name__)

Work = Callable[..., Iterator[Sequence[Tensor]]]
"""Yields tensors, given bases and inputs, which may lie in host memory. What it launches depends on nothing
but their shapes and what it holds itself, bases excepted; it waits for nothing, and brings nothing along from
host memory but its inputs."""

DUE = 3
"""The use of a shape that records it: what has come that often will come again."""
MOST = 32
"""Recordings at once: both ways of keys and of values, so those of a dozen shapes."""
REMEMBERED = 512
"""Shapes whose uses are counted."""
_ALIGN = 16
"""Of inputs that are copied together; enough for every element type."""


class Tape(Protocol):
    """What is launched, in parts, to be launched again."""

    @property
    def nbytes(self) -> int:
        """Of device memory that it holds: whatever was allocated while it recorded."""

    def recording(self) -> AbstractContextManager[None]:
        """Record the next part, on the current stream; nothing runs. What cannot be recorded raises."""

    def replay(self, part: int) -> None:
        """Launch a part on the current stream."""


class Tapes(Protocol):
    """Makes tapes for one device."""

    def lane(self) -> Hashable:
        """Return what tells the current stream from others; None where nothing can be recorded."""

    def tape(self) -> Tape:
        """Return an empty tape."""


class Different(RuntimeError):
    """A recording does not write what was recorded."""


class Graphs:
    """Recordings on one device; from any thread.

    They count against the budget of the device, take no room from bases, and go before bases do.

    Args:
        device: where they lie.
        tapes: makes them.
        residency: keeps that budget.
        failed: told of each shape that stays without a recording, and why: ``memory``, ``capture`` or
            ``different``.
    """

    def __init__(
        self, device: torch.device, tapes: Tapes, residency: Residency,
        failed: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._device, self._tapes, self._residency, self._failed = device, tapes, residency, failed
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()  # least recently used first
        residency.first_to_go(device, self.drop)

    def run(
        self, bases: Sequence[Transform], key: Hashable, work: Work, inputs: Sequence[Tensor]
    ) -> Iterator[Sequence[Tensor]]:
        """Yield what work yields.

        Args:
            bases: held by the caller until he has all of it; the first argument of `work`.
            key: all that work of the same key has in common, but for the shapes of inputs.
            work: what is to be launched.
            inputs: its other arguments.

        Yields:
            Tensors that the next run of the same key and shapes on this lane may overwrite.
        """
        lane = self._tapes.lane()
        shape = self._used((lane, key, *((each.shape, each.dtype) for each in inputs)), bases)
        if (graph := shape.graph) is not None:
            with stage("graph"):
                graph.take(inputs)
            for part in range(len(graph.told)):
                with stage("graph"):
                    told = graph.replayed(part)
                yield told
        elif lane is not None and shape.uses >= shape.due:
            yield from self._recorded(shape, bases, work, inputs)
        else:
            yield from work(bases, *inputs)

    def drop(self) -> None:
        """Give up every recording. One that is being replayed goes once that has been launched."""
        while self._give_up():
            pass

    def _used(self, place: Hashable, bases: Sequence[Transform]) -> _Shape:
        """Count a use of a shape; return it, with its recording if that is of these bases."""
        with self._residency.lock:
            shape = self._shapes.setdefault(place, _Shape())
            self._shapes.move_to_end(place)
            if len(self._shapes) > REMEMBERED:
                self._shapes.popitem(last=False)
            if shape.graph and not shape.graph.is_of(bases):
                shape.give_up()
            shape.uses += 1
            return shape

    def _recorded(
        self, shape: _Shape, bases: Sequence[Transform], work: Work, inputs: Sequence[Tensor]
    ) -> Iterator[Sequence[Tensor]]:
        """Record work, and yield what it yields without that."""
        told: Iterable[Sequence[Tensor]]
        try:
            graph = _Graph(self._tapes.tape(), work, inputs, self._device)
            told = graph.record(bases, inputs)
            self._keep(shape, graph)
        except Exception as error:  # noqa: BLE001 - whatever it is, operations one by one do the work
            shape.due = float("inf")
            self._tell(error)
            told = work(bases, *inputs)
        yield from told

    def _keep(self, shape: _Shape, graph: _Graph) -> None:
        """Count a recording against the budget, in the place of older ones if need be.

        Raises:
            torch.OutOfMemoryError: it has no room beside what else is there.
        """
        nbytes = graph.nbytes
        while self._count() >= MOST or not self._residency.take_spare(self._device, nbytes):
            if not self._give_up():
                raise torch.OutOfMemoryError(f"{nbytes:,} bytes are more than codec.memory has to spare")
        weakref.finalize(graph, self._residency.give_back, self._device, nbytes)
        shape.graph = graph

    def _tell(self, error: Exception) -> None:
        why = "capture"
        if isinstance(error, Different):
            why = "different"
        elif exhausted(error):
            why = "memory"
        self._failed(why)
        _log.warning(
            "work that recurs on %s cannot be replayed, and is told one by one: %r", self._device, error
        )

    def _count(self) -> int:
        with self._residency.lock:
            return sum(shape.graph is not None for shape in self._shapes.values())

    def _give_up(self) -> bool:
        """Give up the least recently used recording; return whether there was one."""
        with self._residency.lock:
            shape = next((shape for shape in self._shapes.values() if shape.graph), None)
            if shape:
                shape.give_up()
            return shape is not None


class _Shape:
    """How often work of one shape was asked for, from which use on it is recorded, and the recording."""

    def __init__(self) -> None:
        self.uses = 0
        self.due: float = DUE
        self.graph: _Graph | None = None

    def give_up(self) -> None:
        """Let the recording go. Another takes twice as many uses; else shapes would push each other."""
        self.graph, self.uses, self.due = None, 0, 2 * self.due


class _Graph:
    """A recording of work, with inputs of its own.

    Attributes:
        told: by part, what it writes.
    """

    def __init__(self, tape: Tape, work: Work, inputs: Sequence[Tensor], device: torch.device) -> None:
        self._tape, self._work, self._inputs = tape, work, _Inputs(inputs, device)
        self._bases: tuple[weakref.ref[Transform], ...] = ()
        self.told: list[tuple[Tensor, ...]] = []

    @property
    def nbytes(self) -> int:
        """Of device memory that it holds."""
        return self._tape.nbytes + self._inputs.nbytes

    def is_of(self, bases: Sequence[Transform]) -> bool:
        """Tell whether these very bases are what it reads."""
        return all(held() is base for held, base in zip(self._bases, bases, strict=True))

    def take(self, inputs: Sequence[Tensor]) -> None:
        """Copy inputs to where it reads them."""
        self._inputs.take(inputs)

    def replayed(self, part: int) -> tuple[Tensor, ...]:
        """Launch a part; return what it writes."""
        self._tape.replay(part)
        return self.told[part]

    def record(self, bases: Sequence[Transform], inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Do the work, then record it; return what it yields.

        Raises:
            Different: the recording does not write the same.
        """
        with unwatched():
            self.take(inputs)
            given = self._inputs.tensors
            # Also compiles what has to be, and takes the memory that libraries keep for this stream.
            expected = [tuple(told) for told in self._work(bases, *given)]
            again = self._work(bases, *given)
            for _ in expected:
                with self._tape.recording():
                    self.told.append(tuple(next(again)))
            for part, told in enumerate(expected):
                if not all(map(_same, self.replayed(part), told)):
                    raise Different(f"part {part} of a recording does not write what was recorded")
        self._bases = tuple(map(weakref.ref, bases))
        return expected


class _Inputs:
    """Tensors on a device for copies of others; what lies in host memory goes there in one piece."""

    def __init__(self, inputs: Sequence[Tensor], device: torch.device) -> None:
        self._from_host = [each.device.type == "cpu" for each in inputs]
        sizes = [
            -(-each.nbytes // _ALIGN) * _ALIGN if from_host else 0
            for each, from_host in zip(inputs, self._from_host, strict=True)
        ]
        starts = [0, *accumulate(sizes)]
        self._here = torch.empty(starts[-1], dtype=torch.uint8)
        self._there = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self._pieces: list[Tensor] = []
        self.tensors: list[Tensor] = []
        for each, start, from_host in zip(inputs, starts, self._from_host, strict=False):
            piece = slice(start, start + each.nbytes)
            if from_host:
                self._pieces.append(self._here[piece].view(each.dtype).view(each.shape))
                self.tensors.append(self._there[piece].view(each.dtype).view(each.shape))
            else:
                self.tensors.append(torch.empty(each.shape, dtype=each.dtype, device=device))

    @property
    def nbytes(self) -> int:
        """On the device."""
        own = zip(self.tensors, self._from_host, strict=True)
        return self._there.nbytes + sum(each.nbytes for each, from_host in own if not from_host)

    def take(self, inputs: Sequence[Tensor]) -> None:
        """Copy inputs there, on the current stream."""
        pieces = iter(self._pieces)
        for each, own, from_host in zip(inputs, self.tensors, self._from_host, strict=True):
            (next(pieces) if from_host else own).copy_(each)
        # Memory that is not pinned has been read when this returns, and may be written again.
        self._there.copy_(self._here, non_blocking=True)


def _same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    flat = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)
