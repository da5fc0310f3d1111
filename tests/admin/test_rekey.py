"""A store under another master key: the same blocks, found as before, and nothing under the old one."""

from __future__ import annotations

import asyncio
import errno
import itertools
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from engine.test_service import fetch, store
from rich.progress import Progress
from support.crash.zygote import Zygote
from support.faults import unreadable
from support.toy import IDENTITY, block, toy_service
from typer.testing import CliRunner

from kvtcd import bootstrap, custody
from kvtcd.admin import rekey as admin
from kvtcd.admin import store_view
from kvtcd.admin.store_contents import look
from kvtcd.cli import app
from kvtcd.config import Config
from kvtcd.config.daemon import Daemon, Host
from kvtcd.core.errors import AlreadyRunning, ConfigError, StoreFailed, StoreFull
from kvtcd.core.keys import key_id
from kvtcd.tiers.disk import Environment, Put
from kvtcd.tiers.rekeying import Phase
from kvtcd.tiers.state import StateDirectory
from kvtcd.tiers.state_files import StateFiles

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
    said = f"{wrong}: is not the key that {state} is under" if elsewhere else "differs from"
    assert said in str(answer.exception)
    assert all(f"of {tenant}" in str(answer.exception) for tenant in TENANTS if elsewhere)
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
    said = f"the device of {tmp_path} is full. Nothing was changed, and the old key holds; make room, and run"
    with pytest.raises(StoreFull, match=said):
        admin.command(tmp_path, old=None, new=None)
    monkeypatch.undo()

    assert (tmp_path / "master.key").read_bytes() == before
    assert len(list((tmp_path / "tenants").iterdir())) == len(TENANTS)
    check(tmp_path)


def test_without_room_for_a_second_copy_nothing_is_begun(tmp_path, monkeypatch) -> None:
    filled(tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    said = rf"[1-9]\d* kB are needed for a second copy, 1 are free on the device of {tmp_path}\. Nothing was"
    with pytest.raises(StoreFull, match=said):
        admin.command(tmp_path, old=None, new=None)
    assert files(tmp_path) == before


def test_a_device_that_is_full_when_all_is_copied_is_told_with_the_key_that_holds(
    tmp_path, monkeypatch
) -> None:
    filled(tmp_path)
    before = key_id((tmp_path / "master.key").read_bytes()).hex()

    def full(_self, _key) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as filling:
        filling.setattr(StateDirectory, "replace_master_key", full)
        with pytest.raises(
            StoreFull, match=rf"all is whole under the old one \({before}\), and under the new"
        ):
            admin.command(tmp_path, old=None, new=None)
    assert admin.command(tmp_path, old=None, new=None)
    check(tmp_path)


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as started:
        yield started


def killed(zygote, source: Path, operation: str, first: int) -> Iterator[Path]:
    """Yield a copy of a state directory for every second change at which `operation` on it can be killed."""
    for call in itertools.count(first, 2):
        path = source.with_name(f"killed-{call}")
        shutil.copytree(source, path)
        outcome = zygote.call("die_at", call=call, operation=operation, path=str(path))
        if not outcome.signal:
            assert outcome.checked() == "survived"
            assert call > 20, "nothing was interrupted"
            return
        assert outcome.signal == signal.SIGKILL
        yield path
        shutil.rmtree(path)


def readable(path: Path, master: bytes) -> bool:
    """Tell whether a start would go on with a key; then every block has to be sound under it, and alone."""
    state = StateFiles(path)
    if (begun := state.rekeying()) and not begun.whole_under(key_id(master).hex()):
        with pytest.raises(ConfigError, match="a rekey was ended"):
            custody.examine(state, master)
        return False
    custody.examine(state, master)
    with Progress(disable=True) as progress:
        for tag in (tags := custody.in_use(state, master)):
            found = look(state.tenant(tag), master, 0, progress, verify=True)
            assert (found.authentic, found.damaged, found.namespaces["n"].blocks) == (True, 0, 4)
    assert len(tags) == len(TENANTS)
    return True


def ended(path: Path, master: bytes) -> None:
    """Hold that nothing of a rekey is left, and all is under one key."""
    assert {each.name for each in path.iterdir()} <= {"format", "lock", "master.key", "tenants"}
    assert len(list((path / "tenants").iterdir())) == len(TENANTS)
    assert readable(path, master)


@pytest.mark.slow
def test_killed_at_any_step_all_is_under_the_key_that_is_there_and_another_run_ends_it(
    zygote, tmp_path
) -> None:
    filled(source := tmp_path / "filled")
    before, seen = (source / "master.key").read_bytes(), set()
    for path in killed(zygote, source, "rekey", 1):
        key = (path / "master.key").read_bytes()
        phase = (begun := StateFiles(path).rekeying()) and begun.phase
        seen.add((phase, key == before))
        assert readable(path, key)
        admin.command(path, old=None, new=None)
        ended(path, after := (path / "master.key").read_bytes())
        assert after != before
    assert seen == {
        (None, True), (Phase.COPYING, True), (Phase.COPIED, True), (Phase.COPIED, False),
        (Phase.REMOVING, False), (None, False),
    }  # fmt: skip


@pytest.mark.slow
def test_killed_with_keys_that_are_kept_elsewhere_it_is_said_which_one_holds(zygote, tmp_path) -> None:
    filled(source := tmp_path / "filled")
    keys = {"old": (source / "master.key").rename(tmp_path / "old"), "new": tmp_path / "new"}
    keys["new"].write_bytes(secrets.token_bytes(32))
    keys["new"].chmod(0o600)
    old, new = (keys[name].read_bytes() for name in ("old", "new"))
    holding = {
        None: {(True, False), (False, True)}, Phase.COPYING: {(True, False)}, Phase.COPIED: {(True, True)},
        Phase.REMOVING: {(False, True)},
    }  # fmt: skip
    seen = set()
    for path in killed(zygote, source, "rekey to a key of one's own", 2):
        phase = (begun := StateFiles(path).rekeying()) and begun.phase
        seen.add(phase)
        if begun:
            assert (readable(path, old), readable(path, new)) in holding[phase]
        if not begun:
            with suppress(ConfigError):
                custody.examine(StateFiles(path), new)
                continue  # it had ended
        admin.command(path, old=keys["old"], new=keys["new"])
        ended(path, new)
    assert seen == {*holding}


class Killed(BaseException):
    """What ends a rekey here, in the place of a signal."""


def dies(*_: object, **__: object) -> NoReturn:
    raise Killed


@pytest.fixture
def removing(tmp_path, monkeypatch) -> dict[str, Path]:
    """A state directory whose key is kept elsewhere, as a kill in the last step leaves it; and its keys."""
    paths = {name: tmp_path / name for name in ("state", "old", "new", "third")}
    filled(paths["state"])
    (paths["state"] / "master.key").rename(paths["old"])
    for name in ("new", "third"):
        paths[name].write_bytes(secrets.token_bytes(32))
        paths[name].chmod(0o600)
    with monkeypatch.context() as dying:
        dying.setattr(StateDirectory, "remove_tenant", dies)
        with pytest.raises(Killed):
            admin.command(paths["state"], old=paths["old"], new=paths["new"])
    return paths


def test_after_a_kill_in_the_last_step_all_commands_say_which_key_holds(removing, capsys) -> None:
    state, old, new = removing["state"], removing["old"], removing["new"]
    settings = Config(daemon=Daemon(state=state), host=Host(capacity=1 << 22))
    names = [key_id(each.read_bytes()).hex() for each in (new, old)]
    said = "all is whole under the new one ({}), and no more under the old ({})".format(*names)
    assert not store_view.command(state, shown=0, verify=False, key=old, json=None)
    shown = capsys.readouterr().out
    assert said in shown
    assert "The key at hand is the old one" in shown
    for refused in (
        lambda: bootstrap.examine(settings, master=old.read_bytes(), remote=None),
        lambda: asyncio.run(serving(settings, old.read_bytes())),
    ):
        with pytest.raises(ConfigError) as answer:
            refused()
        assert said in str(answer.value)
        assert "The key that is there is the old one: put the other back" in str(answer.value)
    with pytest.raises(ConfigError) as answer:
        admin.command(state, old=old, new=removing["third"])
    assert said in str(answer.value)

    assert not store_view.command(state, shown=0, verify=False, key=new, json=None)
    assert "The key at hand is the new one" in capsys.readouterr().out
    (note, *_) = bootstrap.examine(settings, master=new.read_bytes(), remote=None).notes
    assert said in note
    assert "This is the key that holds" in note
    asyncio.run(serving(settings, new.read_bytes()))
    admin.command(state, old=old, new=new)
    assert "8 records of 2 tenants" in capsys.readouterr().out
    ended(state, new.read_bytes())


async def serving(settings: Config, master: bytes) -> None:
    """Have a daemon start and end."""
    async with bootstrap.service(settings, master=master) as running:
        assert [running.namespaces(tenant)[0].name for tenant in TENANTS] == ["n", "n"]
        assert not running.overview.degraded


def test_it_goes_on_without_the_old_key_and_not_without_the_new(removing) -> None:
    state, new = removing["state"], removing["new"]
    removing["old"].unlink()
    with pytest.raises(ConfigError, match="say with --new-key"):
        admin.command(state, old=None, new=None)
    with pytest.raises(ConfigError, match="Neither of --old-key and --new-key is that key"):
        admin.command(state, old=None, new=removing["third"])
    admin.command(state, old=None, new=new)
    ended(state, new.read_bytes())


def test_what_is_stored_after_a_kill_is_kept_by_the_next_run(tmp_path, monkeypatch) -> None:
    """All was copied, and a daemon goes on under the old key: what is copied is then not all there is."""
    filled(tmp_path)
    with monkeypatch.context() as dying:
        dying.setattr(StateDirectory, "replace_master_key", dies)
        with pytest.raises(Killed):
            admin.command(tmp_path, old=None, new=None)
    state = StateDirectory(tmp_path)
    assert state.rekeying().phase is Phase.COPIED
    (said,) = custody.settle(state, key := state.master_key())
    assert "This is the key that holds" in said
    assert (state.rekeying().phase, state.master_key()) == (Phase.COPYING, key)
    state.close()


def test_a_failure_takes_back_what_was_begun_and_the_word_of_it(tmp_path, monkeypatch) -> None:
    filled(tmp_path)
    before = files(tmp_path / "tenants")
    with monkeypatch.context() as dying:
        dying.setattr(Environment, "write", dies)
        with pytest.raises(Killed):
            admin.command(tmp_path, old=None, new=None)
    assert StateFiles(tmp_path).rekeying() is None
    assert {name for name in files(tmp_path / "tenants") if name.endswith("data.mdb")} <= before.keys()
    check(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"phase": "asleep"}', b"\xff", b"[" * 100_000])
def test_a_word_of_a_rekey_that_is_none_is_refused_by_name(tmp_path, content) -> None:
    filled(tmp_path)
    (tmp_path / "rekey").write_bytes(content)
    for refused in (
        lambda: admin.command(tmp_path, old=None, new=None),
        lambda: custody.examine(StateFiles(tmp_path), (tmp_path / "master.key").read_bytes()),
    ):
        with pytest.raises(ConfigError, match=f"{tmp_path / 'rekey'}: is not what `kvtcd rekey` writes"):
            refused()


def test_where_master_key_is_the_wrong_one_it_is_blamed(tmp_path) -> None:
    state, right = tmp_path / "state", tmp_path / "right"
    filled(state)
    (state / "master.key").rename(right)
    (state / "master.key").write_bytes(secrets.token_bytes(32))
    (state / "master.key").chmod(0o600)
    with pytest.raises(ConfigError, match=r"master.key: is not the key that .*; put that one in its place"):
        admin.command(state, old=None, new=None)
    with pytest.raises(ConfigError, match=r"master.key: is another key than --old-key, which all is under"):
        admin.command(state, old=right, new=None)
    (state / "master.key").unlink()
    with pytest.raises(ConfigError, match="say with --old-key which key it is under"):
        admin.command(state, old=None, new=right)
    right.rename(state / "master.key")
    check(state)


def test_what_was_set_aside_is_not_left_behind_under_a_key_that_is_gone(tmp_path) -> None:
    filled(tmp_path)
    tenant = next((tmp_path / "tenants").iterdir())
    (generation,) = tenant.iterdir()
    aside = tenant / "00000000.bad-1764000000"
    shutil.copytree(generation, aside)
    with pytest.raises(ConfigError, match=f"{aside} was damaged and set aside"):
        admin.command(tmp_path, old=None, new=None)
    shutil.rmtree(aside)
    admin.command(tmp_path, old=None, new=None)
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
