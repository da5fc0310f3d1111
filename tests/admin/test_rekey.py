"""A store under another master key: the same blocks, found as before, and nothing under the old one."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from engine.test_service import fetch, store
from support.faults import unreadable
from support.toy import IDENTITY, block, toy_service
from typer.testing import CliRunner

from kvtcd.admin import rekey as admin
from kvtcd.cli import app
from kvtcd.core.errors import AlreadyRunning, ConfigError, StoreFailed, StoreFull
from kvtcd.tiers.disk import Environment, Put
from kvtcd.tiers.state import StateDirectory

TENANTS = ("uid:1", "uid:2")


def filled(path: Path, *, encrypt: bool = False) -> None:
    asyncio.run(_fill(path, encrypt=encrypt))


async def _fill(path: Path, *, encrypt: bool) -> None:
    async with toy_service(path, encrypt=encrypt) as toy:
        for number, tenant in enumerate(TENANTS):
            ns = await toy.service.register(tenant, "n", IDENTITY)
            await store(toy.service, ns, {n: block(10 * number + n) for n in range(3)}, durable=True)
            await store(toy.service, ns, {9: block(99)}, salt=b"salted", durable=True)


def check(path: Path) -> None:
    asyncio.run(_check(path))


async def _check(path: Path) -> None:
    async with toy_service(path) as toy:
        for number, tenant in enumerate(TENANTS):
            ns = await toy.service.register(tenant, "n", IDENTITY)
            assert [await fetch(toy.service, ns, n) for n in range(3)] == [
                block(10 * number + n) for n in range(3)
            ]
            assert await fetch(toy.service, ns, 9, salt=b"salted") == block(99)


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_what_was_stored_is_found_under_the_new_key(tmp_path, encrypt, capsys) -> None:
    filled(tmp_path, encrypt=encrypt)
    before, tags = (tmp_path / "master.key").read_bytes(), set((tmp_path / "tenants").iterdir())
    admin.command(tmp_path, old=None, new=None)

    assert "8 records of 2 tenants" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "master.key").read_bytes() != before
    assert tags.isdisjoint((tmp_path / "tenants").iterdir())
    check(tmp_path)


def test_with_the_old_key_put_back_nothing_is_served_or_removed(tmp_path) -> None:
    filled(tmp_path)
    before = (tmp_path / "master.key").read_bytes()
    admin.command(tmp_path, old=None, new=None)
    after = (tmp_path / "master.key").read_bytes()
    (tmp_path / "master.key").write_bytes(before)
    asyncio.run(_refused(tmp_path))
    (tmp_path / "master.key").write_bytes(after)

    check(tmp_path)


async def _refused(path: Path) -> None:
    async with toy_service(path) as toy:
        assert not toy.service.ready


def files(path: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["file", "credential"])
def test_with_another_old_key_than_the_one_it_is_under_nothing_changes(tmp_path, elsewhere) -> None:
    state, wrong, new = tmp_path / "state", tmp_path / "wrong", tmp_path / "new"
    filled(state)
    for each in (wrong, new):
        each.write_bytes(secrets.token_bytes(32))
        each.chmod(0o600)
    if elsewhere:
        (state / "master.key").rename(tmp_path / "right")
    before = files(state)
    answer = CliRunner().invoke(
        app, ["rekey", str(state), "--old-key", str(wrong), "--new-key", str(new)], catch_exceptions=True
    )

    assert isinstance(answer.exception, ConfigError)
    assert ("Is it the right key?" if elsewhere else "differs from") in str(answer.exception)
    assert files(state) == before


def test_another_old_key_is_refused_where_nothing_is_stored_either(tmp_path) -> None:
    state = StateDirectory(tmp_path / "state")
    key = state.master_key()
    state.close()
    (wrong := tmp_path / "wrong").write_bytes(secrets.token_bytes(32))
    wrong.chmod(0o600)
    with pytest.raises(ConfigError, match="differs from"):
        admin.command(tmp_path / "state", old=wrong, new=None)

    assert (tmp_path / "state" / "master.key").read_bytes() == key


def test_one_tenant_under_another_key_or_unreadable_is_named_and_nothing_changes(tmp_path) -> None:
    filled(tmp_path)
    first, second = sorted((tmp_path / "tenants").iterdir())
    moved = second.rename(second.with_name("ab" * 16))
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=rf"{moved} \(0\.\d MB\)"):
        admin.command(tmp_path, old=None, new=None)
    assert files(tmp_path) == before
    moved.rename(second)
    unreadable(first)
    before = files(tmp_path)
    with pytest.raises(StoreFailed, match=f"{first}: .*move it away"):
        admin.command(tmp_path, old=None, new=None)

    assert files(tmp_path) == before


def test_keys_that_are_kept_elsewhere(tmp_path, capsys) -> None:
    state, old, new = tmp_path / "state", tmp_path / "old", tmp_path / "new"
    filled(state)
    (state / "master.key").rename(old)
    new.write_bytes(secrets.token_bytes(32))
    new.chmod(0o600)
    with pytest.raises(ConfigError, match="say with --new-key"):
        admin.command(state, old=old, new=None)
    admin.command(state, old=old, new=new)

    assert not (state / "master.key").exists()
    assert "credential" in capsys.readouterr().out
    (state / "master.key").write_bytes(new.read_bytes())
    (state / "master.key").chmod(0o600)
    check(state)


def test_a_failure_in_the_middle_changes_nothing(tmp_path, monkeypatch) -> None:
    filled(tmp_path)
    before = (tmp_path / "master.key").read_bytes()
    write, calls = Environment.write, 0

    def full(self, puts, drops) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StoreFull("write", "ENOSPC")
        write(self, puts, drops)

    monkeypatch.setattr(Environment, "write", full)
    with pytest.raises(StoreFull):
        admin.command(tmp_path, old=None, new=None)
    monkeypatch.undo()

    assert (tmp_path / "master.key").read_bytes() == before
    assert len(list((tmp_path / "tenants").iterdir())) == len(TENANTS)
    check(tmp_path)


def test_killed_before_the_key_is_replaced_the_old_one_holds(tmp_path, monkeypatch) -> None:
    filled(tmp_path)
    with monkeypatch.context() as dying:
        dying.setattr(StateDirectory, "replace_master_key", lambda *_: (_ for _ in ()).throw(SystemExit))
        dying.setattr(StateDirectory, "remove_tenant", lambda *_: None)
        with pytest.raises(SystemExit):
            admin.command(tmp_path, old=None, new=None)
    assert len(list((tmp_path / "tenants").iterdir())) == 2 * len(TENANTS), "as a kill leaves them"

    check(tmp_path)


def test_killed_before_the_old_environments_went_the_new_key_holds(tmp_path, monkeypatch) -> None:
    filled(tmp_path)
    with monkeypatch.context() as dying:
        dying.setattr(StateDirectory, "remove_tenant", lambda *_: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            admin.command(tmp_path, old=None, new=None)
    assert len(list((tmp_path / "tenants").iterdir())) == 2 * len(TENANTS)

    check(tmp_path)


def test_a_damaged_record_is_left_behind(tmp_path, capsys) -> None:
    filled(tmp_path)
    state = StateDirectory(tmp_path)
    tag = next(state.tenants())
    environment = Environment(state.tenant(tag), quota=1 << 30)
    (page,) = environment.scan()
    envelope, blob = environment.read(page.keys[0])
    damaged = blob.copy()
    damaged[-1] ^= 1
    environment.write([Put(page.keys[0], envelope, damaged)], [])
    environment.close()
    state.close()
    assert not admin.command(tmp_path, old=None, new=None), "a script is told that something is gone"

    assert "7 records of 2 tenants are under the new key; 1 were damaged" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_cannot_be_done_is_said(tmp_path) -> None:
    filled(tmp_path)
    with pytest.raises(ConfigError, match="is the key that it is under already"):
        admin.command(tmp_path, old=None, new=tmp_path / "master.key")
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes"):
        admin.command(tmp_path, old=None, new=tmp_path / "short")
    with pytest.raises(ConfigError, match="is no state directory"):
        admin.command(tmp_path / "tenants", old=None, new=None)
    held = StateDirectory(tmp_path)
    with pytest.raises(AlreadyRunning):
        admin.command(tmp_path, old=None, new=None)
    held.close()
