"""Files of a store that has shrunk, written anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from admin.test_store_view import BLOB
from admin.test_store_view import put as sealed
from support.faults import unreadable
from support.records import keys_in
from support.toy import IDENTITY
from typer.testing import CliRunner

from kvtcd.admin import compact as admin
from kvtcd.cli import app
from kvtcd.core.errors import AlreadyRunning, ConfigError, Truncated
from kvtcd.core.keys import TenantKeys
from kvtcd.engine.namespaces import TENANT_NAME, persisted
from kvtcd.tiers.disk import Environment, Put
from kvtcd.tiers.disk.generation import Generation
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


def test_without_room_for_a_second_copy_nothing_is_lost(state, monkeypatch, capsys) -> None:
    before = stored(state)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert not admin.command(state)

    assert "are needed for a second copy" in " ".join(capsys.readouterr().out.split())
    assert len(stored(state)) == len(before)


def test_what_is_damaged_is_set_aside_and_kept_and_said(state) -> None:
    (data,) = state.rglob("data.mdb")
    content = bytearray(data.read_bytes())
    content[:8192] = bytes(8192)
    data.write_bytes(content)
    answer = CliRunner().invoke(app, ["compact", str(state)])

    assert answer.exit_code == 1
    assert "damaged, and set aside" in " ".join(answer.output.split())
    (kept,) = [each for each in (state / "tenants" / TAG).iterdir() if ".bad-" in each.name]
    assert (kept / "data.mdb").read_bytes() == bytes(content)
    again = CliRunner().invoke(app, ["compact", str(state)])
    assert (again.exit_code, kept.name in "".join(again.output.split())) == (1, True)
    assert (kept / "data.mdb").read_bytes() == bytes(content), "nobody has said that it may go"
    shutil.rmtree(kept)
    assert CliRunner().invoke(app, ["compact", str(state)]).exit_code == 0


@pytest.fixture
def authentic(tmp_path: Path) -> Path:
    """A state directory with three sound blocks of a tenant."""
    path = tmp_path / "authentic"
    held = StateDirectory(path)
    keys = TenantKeys.derive(held.master_key(), "uid:1")
    environment = Environment(held.tenant(keys.tag.hex()), quota=1 << 24)
    environment.put_namespace(TENANT_NAME, b"uid:1")
    environment.put_namespace("docs", persisted(IDENTITY, 1))
    environment.write([sealed(keys, number) for number in range(3)], [])
    environment.close()
    held.close()
    return path


def compacted(path: Path, *options: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, ["compact", str(path), *options])
    return answer.exit_code, " ".join(answer.output.split())


def test_a_record_whose_bytes_are_wrong_is_counted_and_stays(authentic: Path) -> None:
    assert compacted(authentic)[0] == 0
    (data,) = authentic.rglob("data.mdb")
    content = bytearray(data.read_bytes())
    content[content.rindex(BLOB[-64:])] ^= 1
    data.write_bytes(content)

    for _ in range(2):
        code, said = compacted(authentic)
        assert code == 1
        assert "1 records are damaged" in said
    (authentic / "master.key").unlink()
    code, said = compacted(authentic)
    assert code == 1
    assert "1 records are damaged" in said, "its checksum is wrong as well"
    assert "no master key here: checksums alone were compared" in said


def test_a_record_of_which_parts_are_missing_is_not_lost_in_silence(authentic: Path, monkeypatch) -> None:
    read, seen = Generation.read, list[bytes]()

    def cut(generation, key, take):
        seen.append(key)
        if len(seen) == 1:
            raise Truncated("record", "chunk 0 of a blob is missing")
        return read(generation, key, take)

    monkeypatch.setattr(Generation, "read", cut)
    code, said = compacted(authentic)
    assert code == 1
    assert "1 records of which parts were missing are gone" in said


def test_one_that_cannot_be_read_is_named_and_the_others_are_done(state) -> None:
    for name in ("00" * 16, "ff" * 16):
        shutil.copytree(state / "tenants" / TAG, state / "tenants" / name)
    unreadable(state / "tenants" / ("00" * 16))
    answer = CliRunner().invoke(app, ["compact", str(state)])

    assert answer.exit_code == 1
    assert "as it was: disk open failed" in " ".join(answer.output.split())
    assert MARK not in stored_of(state, TAG) + stored_of(state, "ff" * 16)


def test_a_folder_that_may_not_be_searched_is_named_as_well(state, monkeypatch, capsys) -> None:
    def closed(_path) -> bool:
        raise PermissionError(13, "Permission denied")  # root may do all, so no mode forbids it

    monkeypatch.setattr(Path, "is_file", lambda path: closed(path) if TAG in str(path) else path.exists())
    assert not admin.command(state)
    assert "Permission denied" in " ".join(capsys.readouterr().out.split())


def stored_of(state, tag: str) -> bytes:
    return stored(state / "tenants" / tag)


def test_what_cannot_be_done_is_said(state) -> None:
    with pytest.raises(ConfigError, match="is no state directory"):
        admin.command(state / "tenants")
    held = StateDirectory(state)
    with pytest.raises(AlreadyRunning):
        admin.command(state)
    held.close()


def test_a_key_that_lies_elsewhere_is_named(authentic: Path, tmp_path: Path) -> None:
    """A master key that is a credential is in no state directory: without it forged records look sound."""
    key, other = tmp_path / "credential", tmp_path / "other"
    (authentic / "master.key").rename(key)
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    code, said = compacted(authentic)
    assert (code, "(--key FILE names a key)" in said) == (0, True)
    code, said = compacted(authentic, "--key", str(key))
    assert (code, "no MAC was compared" in said) == (0, False)
    code, said = compacted(authentic, "--key", str(other))
    assert (code, "not fit" in said) == (1, True)

    environment = Environment(next((authentic / "tenants").iterdir()), quota=1 << 24)
    environment.write([sealed(TenantKeys.derive(bytes(32), "uid:1"), 3)], [])
    environment.close()
    assert compacted(authentic)[0] == 0
    code, said = compacted(authentic, "--key", str(key))
    assert (code, "1 records are damaged" in said) == (1, True)
