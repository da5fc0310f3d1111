"""Memory of a GPU that one process shows and another opens: bytes, bounds, order, errors."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.fake_driver import BAD_HANDLE, ILLEGAL, INVALID, NO_CONTEXT, Machine, Process

from kvtcd.core.device_errors import (
    BadHandle,
    DeviceFailed,
    DeviceUnshared,
    NoDriver,
    NotExportable,
    UnknownDevice,
)
from kvtcd.core.errors import BadRequest
from kvtcd.cuda.driver import Driver, Failure
from kvtcd.cuda.exports import Exported, extent
from kvtcd.cuda.imports import Imports

SIZE = 1 << 20


@pytest.fixture
def machine():
    found = Machine()
    yield found
    assert found.faults == []


class Side:
    """An engine with memory, part of which it shows."""

    def __init__(self, machine: Machine, begin: int = 4096, nbytes: int = 8192, **process) -> None:
        self.process = Process(machine, **process)
        self.driver = self.process.driver()
        self.context = self.driver.retain(0)
        with self.driver.current(self.context):
            self.memory = self.driver.allocate(SIZE)
        self.pointer = self.memory + begin
        self.exported = Exported(self.driver, self.pointer, nbytes)

    def free(self) -> None:
        with self.driver.current(self.context):
            self.driver.free(self.memory)


def host(nbytes: int) -> tuple[ctypes.Array, list[tuple[int, int]]]:
    buffer = ctypes.create_string_buffer(nbytes)
    third = nbytes // 3
    at = ctypes.addressof(buffer)
    return buffer, [(at, third), (at + third, nbytes - third)]


def daemon(machine: Machine, **process) -> tuple[Process, Imports]:
    made = Process(machine, **process)
    return made, Imports(made.driver)


def test_what_one_writes_the_other_reads(machine):
    engine, (process, imports) = Side(machine), daemon(machine)
    engine.process.set(engine.pointer, bytes(range(256)) * 32)
    part = imports.open("uid:1", engine.exported.offer())
    found, pieces = host(1000)
    imports.read(part, 100, pieces)
    assert found.raw == (bytes(range(256)) * 32)[100:1100]

    found.raw = b"\x07" * 1000
    imports.write(part, 7000, pieces)
    assert engine.process.bytes_at(engine.pointer + 6999, 1002) == b"\x57" + b"\x07" * 1000 + b"\x40"

    assert (process.imported, part.nbytes) == ([process.memory[process._base(part.pointer)]], 8192)
    imports.close(part)
    assert not process.imported
    engine.exported.close()
    engine.free()
    imports.shut()
    assert not +process.contexts


def test_one_allocation_is_opened_once_and_closed_with_its_last_part(machine):
    engine, (process, imports) = Side(machine), daemon(machine)
    other = Exported(engine.driver, engine.memory, 10)
    first, second = (imports.open("uid:1", one.offer()) for one in (engine.exported, other))
    assert process.calls["cuIpcOpenMemHandle_v2"] == 1
    imports.close(first)
    assert process.imported
    _, pieces = host(9)
    imports.read(second, 0, pieces)
    imports.close(second)
    assert not process.imported


def test_what_one_user_has_open_is_not_another_users(machine):
    engine, (process, imports) = Side(machine), daemon(machine)
    part = imports.open("uid:1", engine.exported.offer())
    with pytest.raises(BadHandle, match="it is in use"):
        imports.open("uid:2", engine.exported.offer())
    imports.close(part)
    assert not process.imported
    imports.close(imports.open("uid:2", engine.exported.offer()))
    assert not process.imported


@pytest.mark.parametrize(("offset", "nbytes"), [(0, SIZE + 1), (SIZE, 1), (SIZE - 10, 11), (1 << 61, 1)])
def test_nothing_beyond_the_allocation_is_a_region(machine, offset, nbytes):
    engine, (process, imports) = Side(machine), daemon(machine)
    with pytest.raises(
        BadRequest, match=f"the region ends at {offset + nbytes}, and its allocation at {SIZE}"
    ):
        imports.open("uid:1", replace(engine.exported.offer(), offset=offset, nbytes=nbytes))
    assert not process.imported
    whole = imports.open("uid:1", replace(engine.exported.offer(), offset=0, nbytes=SIZE))
    imports.close(whole)


def test_an_event_has_come_when_the_work_before_it_is_done(machine):
    engine, (_, imports) = Side(machine), daemon(machine)
    part = imports.open("uid:1", engine.exported.offer())
    assert imports.has_come(part), "nothing was noted"
    with engine.driver.current(engine.context):
        stream = engine.driver.create_stream()
    work = engine.process.things[stream]
    work.queued.append(lambda: engine.process.set(engine.pointer, b"done"))
    engine.exported.record(stream)
    assert not imports.has_come(part)
    work.run()
    assert imports.has_come(part)
    found, pieces = host(4)
    imports.read(part, 0, pieces)
    assert found.raw == b"done"
    imports.close(part)


def test_without_shared_events_the_engine_waits_itself(machine):
    process = Process(machine)
    real = process.cuEventCreate
    process.cuEventCreate = lambda made, flags: INVALID if flags & 4 else real(made, flags)
    driver = process.driver()
    with driver.current(driver.retain(0)):
        memory, stream = driver.allocate(100), driver.create_stream()
    exported = Exported(driver, memory, 100)
    assert exported.offer().event is None
    process.things[stream].queued.append(lambda: process.set(memory, b"done"))
    exported.record(stream)
    assert process.bytes_at(memory, 4) == b"done"


def test_the_host_copies_of_a_client_wait_for_what_was_noted(machine):
    engine = Side(machine)
    with engine.driver.current(engine.context):
        stream = engine.driver.create_stream()
    engine.process.things[stream].queued.append(lambda: engine.process.set(engine.pointer, b"done"))
    engine.exported.record(stream)
    buffer = ctypes.create_string_buffer(4)
    engine.exported.read(0, ctypes.addressof(buffer), 4)
    assert buffer.raw == b"done"


def test_memory_without_a_handle_is_said_to_be_so(machine):
    process = Process(machine)
    process.exportable = False
    driver = process.driver()
    with driver.current(driver.retain(0)):
        memory = driver.allocate(SIZE)
    with pytest.raises(NotExportable, match=r"expandable_segments .* PYTORCH_CUDA_ALLOC_CONF"):
        Exported(driver, memory, SIZE).offer()


def test_a_device_is_known_by_its_uuid_and_not_by_its_number(machine):
    machine.uuids.append(b"\xbb" * 16)
    engine = Side(machine, visible=[1])
    process, imports = daemon(machine, visible=[0, 1])
    part = imports.open("uid:1", engine.exported.offer())
    assert part.uuid == "bb" * 16
    assert process.contexts == {1: 1}
    imports.close(part)
    _, elsewhere = daemon(machine, visible=[0])
    with pytest.raises(UnknownDevice, match="CUDA_VISIBLE_DEVICES") as refused:
        elsewhere.open("uid:1", engine.exported.offer())
    assert (refused.value.uuid, refused.value.visible) == ("bb" * 16, ("a0" * 16,))


def test_a_handle_of_nobody_and_one_of_the_same_process_are_not_opened(machine):
    engine, (process, imports) = Side(machine), daemon(machine)
    with pytest.raises(BadHandle, match=r"INVALID_HANDLE \(400\).*PID namespace"):
        imports.open("uid:1", replace(engine.exported.offer(), handle=b"\x99" * 64))
    with pytest.raises(BadHandle, match=rf"\({NO_CONTEXT}\)"):
        Imports(lambda: engine.driver).open("uid:1", engine.exported.offer())
    with pytest.raises(BadHandle, match="the event cannot be opened"):
        imports.open("uid:1", replace(engine.exported.offer(), event=b"\x99" * 64))
    assert not process.imported


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cuCtxPushCurrent_v2"])
def test_an_error_that_stays_ends_all_use_of_the_device_and_of_no_other(machine, call):
    machine.uuids.append(b"\xbb" * 16)
    here, there = Side(machine, visible=[0]), Side(machine, visible=[1])
    process, imports = daemon(machine)
    parts = [imports.open("uid:1", side.exported.offer()) for side in (here, there)]
    process.script[call] = ILLEGAL
    _, pieces = host(100)
    with pytest.raises(DeviceFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS") as failed:
        imports.read(parts[0], 0, pieces)
    assert failed.value.uuid == "a0" * 16
    process.script.clear()
    process.sticky = 0  # that of the other device, say
    for again in (
        lambda: imports.open("uid:1", here.exported.offer()),
        lambda: imports.read(parts[0], 0, pieces),
        lambda: imports.write(parts[0], 0, pieces),
        lambda: imports.has_come(parts[0]),
    ):
        with pytest.raises(DeviceFailed):
            again()
    imports.read(parts[1], 0, pieces)
    for part in parts:
        imports.close(part)
    imports.shut()


def test_a_passing_error_of_a_copy_leaves_the_rest(machine):
    engine, (process, imports) = Side(machine), daemon(machine)
    part = imports.open("uid:1", engine.exported.offer())
    _, pieces = host(100)
    process.script["cuMemcpyHtoDAsync_v2"] = INVALID
    with pytest.raises(BadHandle):
        imports.write(part, 0, pieces)
    process.script.clear()
    imports.write(part, 0, pieces)
    imports.close(part)


def test_no_driver_and_no_device_are_said_to_be_so(machine, monkeypatch):
    monkeypatch.setattr("kvtcd.cuda.driver.LIBRARY", "libcuda-of-nobody.so.1")
    with pytest.raises(NoDriver, match=r"libcuda-of-nobody.*--?gpus|GPUs"):
        Driver.load()
    monkeypatch.setattr("kvtcd.cuda.driver.LIBRARY", "libc.so.6")
    with pytest.raises(NoDriver, match="cuInit"):
        Driver.load()
    with pytest.raises(NoDriver, match="CUDA_VISIBLE_DEVICES"):
        Process(machine, visible=[]).driver()
    process = Process(machine)
    process.script["cuInit"] = 100
    with pytest.raises(NoDriver, match="cuInit"):
        process.driver()


def cuda_array(**fields):
    said = {"data": (4096, False), "shape": (4, 3), "typestr": "<f2", "strides": None, "version": 2} | fields
    return SimpleNamespace(__cuda_array_interface__=said)


@pytest.mark.parametrize(
    ("memory", "want"),
    [
        ((4096, 7), (4096, 7)),
        (cuda_array(), (4096, 24)),
        (cuda_array(strides=(6, 2)), (4096, 24)),
        (cuda_array(shape=(1, 3), strides=(99, 2)), (4096, 6)),
        (cuda_array(shape=(), typestr="|u1"), (4096, 1)),
    ],
)
def test_memory_is_an_address_or_says_where_it_is(memory, want):
    assert extent(memory) == want


@pytest.mark.parametrize(
    "memory",
    [
        b"bytes", None, (1,), (0, 5), (4096, 0), ("a", 1),
        cuda_array(data=(4096, True)), cuda_array(data=(0, False)), cuda_array(shape=(0,)),
        cuda_array(strides=(8, 2)), cuda_array(shape=(3, 4), strides=(2, 6)), cuda_array(typestr="V"),
        SimpleNamespace(__cuda_array_interface__={}),
    ],
)  # fmt: skip
def test_other_memory_is_refused(memory):
    with pytest.raises(BadRequest):
        extent(memory)


def test_an_address_of_no_gpu_and_a_length_behind_the_end_are_refused(machine):
    engine = Side(machine)
    with pytest.raises(BadRequest, match="0x1 is no address on a GPU"):
        Exported(engine.driver, 1, 1)
    with pytest.raises(BadRequest, match="ends 1 bytes behind its allocation"):
        Exported(engine.driver, engine.memory, SIZE + 1)
    engine.exported.close()
    assert engine.process.contexts == {0: 1}, "that of the engine itself"


def test_every_failure_is_an_error_of_ours(machine):
    """Whatever call fails: opening ends in one of our errors, and nothing stays open."""
    engine = Side(machine)
    offer = engine.exported.offer()
    for call in (
        "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate", "cuIpcOpenMemHandle_v2",
        "cuMemGetAddressRange_v2", "cuIpcOpenEventHandle",
    ):  # fmt: skip
        for code in (INVALID, BAD_HANDLE, ILLEGAL):
            process, imports = daemon(machine)
            process.script[call] = code
            with pytest.raises(DeviceUnshared):
                imports.open("uid:1", offer)
            if code != ILLEGAL:
                assert not process.imported
                process.script.clear()
                imports.close(imports.open("uid:1", offer))
    for call in ("cuMemGetAddressRange_v2", "cuStreamCreate", "cuDevicePrimaryCtxRetain"):
        engine.process.script = {call: INVALID}
        with pytest.raises(BadRequest):
            Exported(engine.driver, engine.memory, 5)
    engine.process.script = {"cuIpcGetMemHandle": INVALID}
    with pytest.raises(BadHandle):
        engine.exported.offer()


def test_a_failure_knows_its_name():
    failure = Failure("cuMemFree_v2", 719, "CUDA_ERROR_LAUNCH_FAILED")
    assert str(failure) == "cuMemFree_v2: CUDA_ERROR_LAUNCH_FAILED (719)"
    assert failure.sticky
    assert not Failure("cuMemFree_v2", 1, "CUDA_ERROR_INVALID_VALUE").sticky
