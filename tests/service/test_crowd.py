"""A real daemon and ten thousand connections that wish it ill: what they cost it in memory."""

from __future__ import annotations

import pytest
from support.hostile import MOST, crowd, hostile_to, matches, memory_mib, room

from kvtcd.api.app import SILENT
from kvtcd.api.connection import HEAD_BYTES
from kvtcd.api.limits import Limits

MOST_MIB = 2 * (SILENT + Limits().connections) * (HEAD_BYTES + (16 << 10)) / (1 << 20)
"""What those that are silent and those that have asked may hold: heads, as text and as bytes, and more."""


@pytest.mark.slow
def test_a_crowd_takes_no_more_memory_than_its_bounds_say_and_others_are_served(tmp_path) -> None:
    size = room(1)
    if size < MOST:
        print(f"{size} connections of {MOST}: more descriptors than this process may have")  # noqa: T201
    with hostile_to(tmp_path) as (daemon, client):
        matches(client, 200)
        before = memory_mib(daemon.pid, "VmHWM")
        for _ in range(2):
            with crowd(daemon.socket, size) as members:
                assert len(members) == size
                assert len(matches(client, 50)) == 50
        assert memory_mib(daemon.pid, "VmHWM") - before < MOST_MIB
