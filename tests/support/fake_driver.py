"""CUDA's driver as a script: a machine with GPUs, the processes on it, and what each may not do.

Copies are done when their stream is waited for, and no sooner. What CUDA calls undefined behaviour is noted
in `Machine.faults`; a test ends with none.
"""
# ruff: noqa: N802 - CUDA's names

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from kvtcd.cuda.driver import PROTOTYPES, Driver

INVALID, NO_CONTEXT, ALREADY_MAPPED, BAD_HANDLE, NOT_READY, ILLEGAL = 1, 201, 208, 400, 600, 700
NAMES = {
    INVALID: b"CUDA_ERROR_INVALID_VALUE", NO_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    ALREADY_MAPPED: b"CUDA_ERROR_ALREADY_MAPPED", BAD_HANDLE: b"CUDA_ERROR_INVALID_HANDLE",
    NOT_READY: b"CUDA_ERROR_NOT_READY", ILLEGAL: b"CUDA_ERROR_ILLEGAL_ADDRESS",
}  # fmt: skip


@dataclass(eq=False)
class Allocation:
    """Memory of a device."""

    process: Process
    device: int
    data: bytearray
    exportable: bool = True
    opened_by: Counter[Process] = field(default_factory=Counter)


@dataclass(eq=False)
class Event:
    """`after` counts what a stream had queued when it was recorded."""

    process: Process
    flags: int
    stream: Stream | None = None
    after: int = 0
    destroyed: bool = False


@dataclass(eq=False)
class Stream:
    """Work in order; `held` keeps what is queued from being done by waiting alone."""

    queued: list[Any] = field(default_factory=list)
    done: int = 0
    held: bool = False

    def run(self) -> None:
        """Do what is queued."""
        while self.queued:
            self.queued.pop(0)()
            self.done += 1


class Machine:
    """GPUs, and the memory and events that have handles."""

    def __init__(self, devices: int = 1) -> None:
        self.uuids = [bytes([0xA0 + n]) * 16 for n in range(devices)]
        self.handles: dict[bytes, Allocation | Event] = {}
        self.faults: list[str] = []
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)

    def handle(self, of: Allocation | Event) -> bytes:
        """Return the handle of something, always the same, and no other's."""
        for handle, known in self.handles.items():
            if known is of:
                return handle
        made = next(self.numbers).to_bytes(64, "little")
        self.handles[made] = of
        return made


def _call(function):
    @functools.wraps(function)
    def called(self, *arguments):
        with self.machine.lock:
            name = function.__name__
            self.calls[name] += 1
            if self.sticky:
                return self.sticky
            if name in self.script:
                code = self.script[name]
                if code == ILLEGAL:
                    self.sticky = code
                return code
            return function(self, *arguments) or 0

    return called


def _in_context(function):
    @_call
    @functools.wraps(function)
    def called(self, *arguments):
        return function(self, *arguments) if self.stack else NO_CONTEXT

    return called


class Process:
    """One process's driver. `script` says which calls fail with which code."""

    def __init__(self, machine: Machine, visible: list[int] | None = None) -> None:
        self.machine = machine
        self.visible = list(range(len(machine.uuids))) if visible is None else visible
        self.script: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.sticky = 0
        self.memory: dict[int, Allocation] = {}
        self.things: dict[int, Any] = {}
        self.contexts: Counter[int] = Counter()
        self.exportable = True
        self._threads: defaultdict[int, list[int]] = defaultdict(list)
        self._next = 0x7000_0000_0000 + 0x100_0000_0000 * next(machine.numbers)

    def driver(self) -> Driver:
        """Return it as the daemon or a client has it."""
        return Driver(self)

    @property
    def stack(self) -> list[int]:
        return self._threads[threading.get_ident()]

    def end(self) -> None:
        """Die: what it had is gone."""
        for handle, what in list(self.machine.handles.items()):
            if what.process is self:
                del self.machine.handles[handle]
        self.memory.clear()

    @property
    def imported(self) -> list[Allocation]:
        """What it has open of other processes."""
        return [one for one in self.memory.values() if one.process is not self]

    def bytes_at(self, pointer: int, nbytes: int) -> bytes:
        """Return what is in memory now."""
        allocation, offset = self._find(pointer)
        return bytes(allocation.data[offset : offset + nbytes])

    def set(self, pointer: int, data: bytes) -> None:
        """Write to memory now, as a kernel would."""
        allocation, offset = self._find(pointer)
        allocation.data[offset : offset + len(data)] = data

    def _find(self, pointer: int) -> tuple[Allocation, int] | None:
        for base, allocation in self.memory.items():
            if base <= pointer < base + len(allocation.data):
                return allocation, pointer - base
        return None

    def _base(self, pointer: int) -> int:
        allocation, offset = self._find(pointer)
        assert allocation
        return pointer - offset

    def _map(self, allocation: Allocation) -> int:
        at, self._next = self._next, self._next + len(allocation.data) + (1 << 21)
        self.memory[at] = allocation
        return at

    def _thing(self, made, thing) -> None:
        number = 0x1000 + next(self.machine.numbers)
        self.things[number] = thing
        made._obj.value = number

    # The functions ---------------------------------------------------------------------------------------

    @_call
    def cuInit(self, flags): ...

    def cuGetErrorName(self, code, name):
        name._obj.value = NAMES.get(code, b"CUDA_ERROR_OTHER")
        return 0

    @_call
    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.visible)

    @_call
    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal

    @_call
    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid._obj.data[:] = self.machine.uuids[self.visible[device]]

    @_call
    def cuDevicePrimaryCtxRetain(self, context, device):
        self.contexts[device] += 1
        context._obj.value = 0xC000 + device

    @_call
    def cuDevicePrimaryCtxRelease_v2(self, device):
        self.contexts[device] -= 1
        on_it = [one for one in self.imported if one.device == self.visible[device]]
        if not self.contexts[device] and on_it:
            self.machine.faults.append("a context ended with memory of others open in it")

    @_call
    def cuCtxPushCurrent_v2(self, context):
        self.stack.append(context)

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.stack.pop()
        return self.sticky

    @_call
    def cuPointerGetAttribute(self, value, attribute, pointer):
        if not (found := self._find(pointer)):
            return INVALID
        if attribute == 9:
            value._obj.value = self.visible.index(found[0].device)
        elif attribute == 10:
            value._obj.value = found[0].exportable
        else:
            return INVALID
        return 0

    @_in_context
    def cuMemAlloc_v2(self, pointer, nbytes):
        device = self.visible[self.stack[-1] - 0xC000]
        made = Allocation(self, device, bytearray(nbytes), self.exportable)
        pointer._obj.value = self._map(made)

    @_in_context
    def cuMemFree_v2(self, pointer):
        freed = self.memory.pop(pointer, None)
        if freed is None or freed.process is not self:
            return INVALID
        if +freed.opened_by:
            self.machine.faults.append("memory was freed that others had open")
        for handle, what in list(self.machine.handles.items()):
            if what is freed:
                del self.machine.handles[handle]
        return 0

    @_in_context
    def cuMemGetAddressRange_v2(self, base, nbytes, pointer):
        if not (found := self._find(pointer)):
            return INVALID
        base._obj.value, nbytes._obj.value = self._base(pointer), len(found[0].data)
        return 0

    def _copy(self, pointer, host, nbytes, stream, *, out: bool):
        found = self._find(pointer)
        if stream not in self.things or not found or found[1] + nbytes > len(found[0].data):
            return INVALID
        allocation, offset = found

        def copied() -> None:
            buffer = (ctypes.c_char * nbytes).from_buffer(allocation.data, offset)
            here = ctypes.addressof(buffer)
            ctypes.memmove(host, here, nbytes) if out else ctypes.memmove(here, host, nbytes)
            if found[0] not in self.memory.values():
                self.machine.faults.append("a copy of memory that was closed")

        self.things[stream].queued.append(copied)
        return 0

    @_in_context
    def cuMemcpyDtoHAsync_v2(self, host, pointer, nbytes, stream):
        return self._copy(pointer, host, nbytes, stream, out=True)

    @_in_context
    def cuMemcpyHtoDAsync_v2(self, pointer, host, nbytes, stream):
        return self._copy(pointer, host, nbytes, stream, out=False)

    @_in_context
    def cuIpcGetMemHandle(self, handle, pointer):
        allocation = self.memory.get(pointer)
        if allocation is None or not allocation.exportable or allocation.process is not self:
            return INVALID
        handle._obj.data[:] = self.machine.handle(allocation)
        return 0

    @_in_context
    def cuIpcOpenMemHandle_v2(self, pointer, handle, flags):
        allocation = self.machine.handles.get(bytes(handle.data))
        if flags != 1 or not isinstance(allocation, Allocation):
            return BAD_HANDLE
        if allocation.process is self:
            return NO_CONTEXT
        if allocation.opened_by[self]:
            return ALREADY_MAPPED  # as older releases do
        allocation.opened_by[self] += 1
        pointer._obj.value = self._map(allocation)
        return 0

    @_in_context
    def cuIpcCloseMemHandle(self, pointer):
        allocation = self.memory.get(pointer)
        if allocation is None or allocation.process is self:
            self.machine.faults.append("closed what was not open")
            return INVALID
        del self.memory[pointer]
        allocation.opened_by[self] -= 1
        return 0

    @_in_context
    def cuIpcGetEventHandle(self, handle, event):
        if not self.things[event].flags & 4:
            return INVALID
        handle._obj.data[:] = self.machine.handle(self.things[event])
        return 0

    @_in_context
    def cuIpcOpenEventHandle(self, made, handle):
        event = self.machine.handles.get(bytes(handle.data))
        if not isinstance(event, Event):
            return BAD_HANDLE
        if event.process is self:
            return NO_CONTEXT
        self._thing(made, event)
        return 0

    @_in_context
    def cuStreamCreate(self, made, flags):
        if flags != 1:
            return INVALID
        self._thing(made, Stream())
        return 0

    @_in_context
    def cuStreamSynchronize(self, stream):
        assert not self.things[stream].held, "it would wait for ever"
        self.things[stream].run()

    @_in_context
    def cuStreamDestroy_v2(self, stream):
        if self.things.pop(stream).queued:
            self.machine.faults.append("a stream ended with work in it")

    @_in_context
    def cuEventCreate(self, made, flags):
        if flags & 4 and not flags & 2:
            return INVALID
        self._thing(made, Event(self, flags))
        return 0

    @_in_context
    def cuEventRecord(self, event, stream):
        one = self.things[event]
        one.stream = self.things.setdefault(stream, Stream())
        one.after = one.stream.done + len(one.stream.queued)

    @_in_context
    def cuEventQuery(self, event):
        one = self.things[event]
        if one.destroyed:
            self.machine.faults.append("an event was asked that is gone")
        return NOT_READY if one.stream and one.stream.done < one.after else 0

    @_in_context
    def cuEventSynchronize(self, event):
        if stream := self.things[event].stream:
            assert not stream.held, "it would wait for ever"
            stream.run()

    @_in_context
    def cuEventDestroy_v2(self, event):
        one = self.things.pop(event)
        if one.process is self:
            one.destroyed = True
            for handle, what in list(self.machine.handles.items()):
                if what is one:
                    del self.machine.handles[handle]


for _name, _arguments in PROTOTYPES.items():
    assert len(inspect.signature(getattr(Process, _name)).parameters) == len(_arguments) + 1, _name
