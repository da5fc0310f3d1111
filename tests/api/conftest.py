"""What tests of regions on a GPU have in common: a scripted driver, and an engine that is another process."""

from __future__ import annotations

import pytest
from support.fake_driver import Machine
from support.sharing_engine import Engine


@pytest.fixture
def other_process(monkeypatch):
    """Let the engine be another process, as far as the daemon sees."""
    monkeypatch.setattr("kvtcd.api.side.is_own", lambda _: False)
    yield
    Engine.leave_all()


@pytest.fixture
def machine():
    """A machine with GPUs, on which nothing has gone wrong in the end."""
    found = Machine()
    yield found
    assert found.faults == []
