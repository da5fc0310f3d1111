"""Memory that is mapped for huge pages is memory like any other."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from kvtcd.client import regions
from kvtcd.client.address import Address
from kvtcd.core.regions import SEALS, Span
from kvtcd.mapping import HUGE, make_huge, mapped


def memfd(nbytes: int) -> int:
    fd = os.memfd_create("kvtcd-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def address(memory: mmap.mmap) -> int:
    return addressof(c_char.from_buffer(memory))


def size_of_process() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * mmap.PAGESIZE


def test_nothing_is_left_of_what_made_the_hole() -> None:
    fd, before = memfd(32 * HUGE), size_of_process()
    for _ in range(64):
        mapped(fd, 32 * HUGE).close()
    os.close(fd)
    assert size_of_process() - before < 64 * HUGE


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 5000])
def test_two_see_the_same_bytes_whatever_their_pages(nbytes: int) -> None:
    fd = memfd(nbytes)
    one, other = mapped(fd, nbytes), mapped(fd, nbytes)
    os.close(fd)
    assert len(one) == len(other) == nbytes
    said = os.urandom(nbytes)
    one[:] = said
    view = memoryview(other)
    for number in range(-(-nbytes // HUGE)):
        make_huge(one, number)
    assert bytes(view) == said
    view[-1:] = b"!"
    assert one[-1:] == b"!"
    view.release()
    other.close()
    assert one[: nbytes - 1] == said[:-1], "each is unmapped by itself"


def test_pages_are_huge_where_the_kernel_has_them() -> None:
    nbytes = 4 * HUGE
    fd = memfd(nbytes)
    memory = mapped(fd, nbytes)
    os.close(fd)
    if address(memory) % HUGE:
        pytest.skip("another thread took the place")
    memory[:] = bytes(nbytes)
    try:
        memory.madvise(25, 0, nbytes)
    except OSError as error:
        pytest.skip(f"this kernel makes no huge pages of a memfd: {error}")
    for number in range(4):
        make_huge(memory, number)
    assert memory[:] == bytes(nbytes)  # touched, so that they are mapped
    found = re.search(
        rf"^{address(memory):x}-.*?ShmemPmdMapped: *(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert found
    assert int(found[1]) * 1024 == nbytes


def test_a_region_has_huge_pages_under_what_is_lent_again_and_asks_for_each_once(monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(regions, "make_huge", lambda _memory, number: asked.append(number))
    with regions.Region(Address.of("/nowhere/kvtcd.sock", None), 3 * HUGE + 10) as region:
        region.settle([Span(0, 1), Span(HUGE, HUGE + 1)])
        assert asked == []
        region.settle([Span(5, 5)])
        assert asked == [0]
        region.settle([Span(0, 3 * HUGE + 10)])  # the rest of it is no whole page
        assert sorted(asked) == [0, 1, 2]
        region.settle([Span(0, 3 * HUGE + 10), Span(3 * HUGE + 1, 5)])
        assert sorted(asked) == [0, 1, 2]
