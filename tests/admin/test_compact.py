"""Files of a store that has shrunk, written anew."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
from support.records import keys_in

from kvtcd.admin import compact as admin
from kvtcd.core.errors import AlreadyRunning, ConfigError, StoreFull
from kvtcd.tiers.disk import Environment, Put
from kvtcd.tiers.state import StateDirectory

TAG = "ab" * 16
MARK = b"what was dropped is not to be found any more"


@pytest.fixture
def state(tmp_path):
    """A state directory whose file has room for 40 records and holds one."""
    held = StateDirectory(tmp_path)
    environment = Environment(held.tenant(TAG), quota=1 << 26)
    environment.put_namespace("docs", b"identity")
    content = MARK + bytes(1 << 18)
    for number in range(40):
        environment.write([Put(bytes([number]) * 32, b"envelope", content)], [])
    environment.write([], [bytes([number]) * 32 for number in range(40)])
    environment.write([Put(b"k" * 32, b"envelope", b"blob")], [])
    environment.close()
    held.close()
    return tmp_path


def stored(path) -> bytes:
    return b"".join(file.read_bytes() for file in path.rglob("data.mdb"))


def test_what_is_kept_is_there_and_the_rest_gives_its_room_back(state, capsys) -> None:
    before = len(stored(state))
    assert MARK in stored(state)
    admin.command(state)

    assert len(stored(state)) < before / 20
    assert MARK not in stored(state)
    held = StateDirectory(state)
    environment = Environment(held.tenant(TAG), quota=1 << 26)
    assert keys_in(environment) == [b"k" * 32]
    assert environment.namespaces() == {"docs": b"identity"}
    environment.close()
    held.close()
    assert TAG[:8] in capsys.readouterr().out


def test_without_room_for_a_second_copy_nothing_is_lost(state, monkeypatch) -> None:
    before = stored(state)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StoreFull, match="are needed for a second copy"):
        admin.command(state)

    assert len(stored(state)) == len(before)


def test_what_cannot_be_done_is_said(state) -> None:
    with pytest.raises(ConfigError, match="is no state directory"):
        admin.command(state / "tenants")
    held = StateDirectory(state)
    with pytest.raises(AlreadyRunning):
        admin.command(state)
    held.close()
