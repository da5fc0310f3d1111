"""Recordings on a second device made of the CPU, as strict as a capture on CUDA, and as forgetful.

While a tape records, operations are written down, and what they make holds nothing afterwards: a capture runs
nothing. A replay does them again with whatever the same tensors hold by then, so what differs between blocks
and is no input shows: it is as it was when it was recorded. Tensors that were there before are not kept: a
graph knows no more of them than where they are, and a replay that reads one that has gone is an error. So is
what a capture refuses: copies to and from host memory, its values in an operation, waiting for a number.
"""

# torch's hooks are given whatever an operator takes.
# ruff: noqa: ANN401

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from kvtcd.codec.graphs import Tape, Tapes
from kvtcd.lab.second_device import WAITING, Operation, SecondDevice, here, is_there, tensors

_GARBAGE = 0xEE
_LAUNCH = Operation("graph", (), (), 0, launches=True, runs=False, crosses=0, to_host=False, waits=False)


class SecondTapes(Tapes):
    """Makes tapes for the second device; lanes are threads.

    Args:
        device: that is active.
    """

    def __init__(self, device: SecondDevice) -> None:
        self._device = device

    def lane(self) -> int:
        """Return the current thread."""
        return threading.get_ident()

    def tape(self) -> SecondTape:
        """Return an empty tape."""
        return SecondTape(self._device)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in what is written down."""

    number: int


@dataclass(frozen=True, slots=True)
class _Step:
    """An operation: what does it, given its arguments, and where its results go."""

    compute: Callable[..., Sequence[Tensor]]
    given: Any
    written: tuple[_Place, ...]


class SecondTape(Tape):
    """Operations in parts."""

    def __init__(self, device: SecondDevice) -> None:
        self._device = device
        self._memory = _Memory()
        self._parts: list[tuple[list[_Step], list[Operation]]] = []

    @property
    def nbytes(self) -> int:
        """Of all that recording has made."""
        return sum(tensor.nbytes for tensor in self._memory.made.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the next part."""
        told: list[Operation] = []
        part = _Recording(self._memory)
        self._device.watched = part.write_down
        try:
            with self._device.telling(told.append), part:
                yield
        finally:
            self._device.watched = None
        self._memory.scramble()
        self._parts.append((part.steps, told))

    def replay(self, part: int) -> None:
        """Do a part again, and tell of one launch."""
        if not part:
            self._memory.settle()
        steps, told = self._parts[part]
        with self._device.telling(lambda _: None):
            for step in steps:
                self._memory.do(step)
        if part + 1 == len(self._parts):
            self._memory.settle()
        for operation in told:
            self._device.tell(replace(operation, launches=False))
        self._device.tell(_LAUNCH)


class _Memory:
    """The tensors of a tape.

    Attributes:
        made: by what is recorded, in memory of their own.
    """

    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}
        self._others: dict[int, weakref.ref[Tensor]] = {}
        self._views: dict[int, Tensor] = {}
        self._places: dict[int, _Place] = {}
        self._recorded: list[Tensor] = []  # until the first replay: another could have the same `id`

    def place(self, tensor: Tensor, *, made: bool = False, view: bool = False) -> _Place:
        """Return what stands for a tensor."""
        if id(tensor) not in self._places:
            place = self._places[id(tensor)] = _Place(len(self._places))
            self._recorded.append(tensor)
            if made:
                self.made[place.number] = tensor
            elif not view:  # which is made again by each replay
                self._others[place.number] = weakref.ref(tensor)
        return self._places[id(tensor)]

    def scramble(self) -> None:
        """Overwrite what recording has made."""
        for tensor in self.made.values():
            torch.empty(0, dtype=torch.uint8).set_(here(tensor).untyped_storage()).fill_(_GARBAGE)

    def settle(self) -> None:
        """Let go of all but what recording has made: views hold what they are of."""
        self._recorded.clear()
        self._views.clear()

    def do(self, step: _Step) -> None:
        """Compute a step, and write what comes of it."""
        found = step.compute(tree_map_only(_Place, self._found, step.given))
        for place, new in zip(step.written, found, strict=True):
            if place.number in self.made:
                here(self.made[place.number]).copy_(here(new))
            else:
                self._views[place.number] = new

    def _found(self, place: _Place) -> Tensor:
        if place.number in self._others:
            tensor = self._others[place.number]()
            if tensor is None:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return tensor
        return self.made[place.number] if place.number in self.made else self._views[place.number]


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Writes operations down while it is active."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._memory = memory
        self.steps: list[_Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = tensors((args, kwargs)), tensors(result)
        if any(map(is_there, (*read, *written))):
            name = func.__name__.partition(".")[0]
            if name in WAITING or not written or not all(map(is_there, (*read, *written))):
                raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
            given = tree_map_only(torch.Tensor, self._memory.place, (args, kwargs))
            self._note(lambda given: tensors(func(*given[0], **given[1])), given, read, written)
        return result

    def write_down(self, compute: Callable[[], Sequence[Tensor]], written: Sequence[Tensor]) -> None:
        """Note what kernels compute; they hold on to what they are given."""
        self._note(lambda _: compute(), (), (), written)

    def _note(
        self, compute: Callable[..., Sequence[Tensor]], given: Any, read: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:  # fmt: skip
        before = set(map(_memory, read))
        places = tuple(
            self._memory.place(tensor, made=_memory(tensor) not in before, view=True) for tensor in written
        )
        self.steps.append(_Step(compute, given, places))


def _memory(tensor: Tensor) -> int:
    return here(tensor).untyped_storage().data_ptr()
