"""The state directory: one process, private files, one master key, and no remote file system."""

import contextlib
import errno
import logging
import os
import signal
import stat
import subprocess
import time
from types import SimpleNamespace

import pytest
from support.crash.zygote import Zygote
from support.patience import PATIENCE_S

from kvtcd.core.errors import AlreadyRunning, ConfigError
from kvtcd.tiers import state_files
from kvtcd.tiers.state import StateDirectory, at_rest

TENANT = "0123456789abcdef" * 2


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


def opened(path):
    return contextlib.closing(StateDirectory(path))


def test_a_second_opener_is_refused_until_the_first_closes(path):
    with opened(path):
        with pytest.raises(AlreadyRunning, match="another kvtcd holds"):
            StateDirectory(path)
        with Zygote() as zygote:
            assert zygote.call("open_state", path=str(path)).checked() == "already running"
    with Zygote() as zygote:
        assert zygote.call("open_state", path=str(path)).checked() == "held"


def test_a_killed_holder_leaves_the_directory_free(path, tmp_path):
    with Zygote() as zygote:
        holder = os.pidfd_open(zygote.start("hold_state", path=str(path), told=str(tmp_path / "told")))
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "told").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(AlreadyRunning):
            StateDirectory(path)
        signal.pidfd_send_signal(holder, signal.SIGKILL)
        os.close(holder)
        zygote.finish()
    StateDirectory(path).close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nothing_is_open_to_others_whatever_the_umask(path, umask):
    with Zygote() as zygote:
        zygote.call("create_with_umask", path=str(path), umask=umask).checked()
    found = {entry: entry.stat().st_mode for entry in (path, *path.rglob("*"))}
    names = {entry.name for entry in found}
    assert {"lock", "master.key", "data.mdb", "lock.mdb", "condition"} <= names
    assert any(".bad-" in name for name in names)
    for entry, mode in found.items():
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), entry


def test_the_master_key_is_made_once_and_stays(path):
    with opened(path) as directory:
        key = directory.master_key()
        assert len(key) == 32
        assert directory.master_key() == key
    with opened(path) as directory:
        assert directory.master_key() == key
    with opened(path.with_name("other")) as directory:
        assert directory.master_key() != key


def test_a_master_key_that_is_given_is_used_and_not_written(path):
    with opened(path) as directory:
        assert directory.master_key(b"g" * 32) == b"g" * 32
        assert not (path / "master.key").exists()


def test_a_master_key_that_is_given_must_be_that_of_the_file_if_there_is_one(path):
    with opened(path) as directory:
        key = directory.master_key()
        assert directory.master_key(key) == key
        with pytest.raises(ConfigError, match="differs from"):
            directory.master_key(b"g" * 32)
        assert directory.master_key() == key


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_master_key_of_another_size_that_is_given_is_refused_and_not_shown(path, size):
    with opened(path) as directory, pytest.raises(ConfigError, match="not 32 bytes") as error:
        directory.master_key(b"g" * size)
    assert "ggg" not in str(error.value)


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
def test_a_master_key_of_another_size_is_refused_and_kept(path, content):
    with opened(path) as directory:
        file = path / "master.key"
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(
            ConfigError, match=rf"{file}: not 32 bytes long; restore it, or remove {path}/tenants"
        ):
            directory.master_key()
        assert file.read_bytes() == content


def test_a_master_key_that_others_can_read_is_refused(path):
    with opened(path) as directory:
        directory.master_key()
        (path / "master.key").chmod(0o640)
        with pytest.raises(ConfigError, match=r"mode 0640\); chmod 600 it"):
            directory.master_key()


def test_a_master_key_behind_a_link_is_refused(path):
    with opened(path) as directory:
        (path / "master.key").symlink_to("/dev/zero")
        with pytest.raises(ConfigError, match=r"master\.key: is a link; it must be a file"):
            directory.master_key()


def test_a_master_key_that_cannot_be_read_says_what_it_must_be(path):
    with opened(path) as directory:
        (path / "master.key").mkdir()
        with pytest.raises(
            ConfigError, match=r"master\.key: cannot be read: Is a directory; it must be a file of uid"
        ):
            directory.master_key()


def test_without_its_master_key_a_store_is_kept_and_the_start_refused(path):
    with opened(path) as directory:
        directory.master_key()
        directory.tenant("ab").mkdir()
        file = path / "master.key"
        file.rename(path / "elsewhere")
        with pytest.raises(ConfigError) as error:
            directory.master_key()
        assert str(error.value).startswith(f"{file}: is missing, and what is stored here (1 tenants)")
        assert f"the credential kvtcd.master-key, or remove {path}/tenants" in str(error.value)
        assert not file.exists(), "a new key would have what is stored removed as foreign"
        (path / "elsewhere").rename(file)
        assert directory.master_key() == file.read_bytes()


def test_a_directory_open_to_others_is_refused_and_not_changed(path):
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700 it or choose another"):
        StateDirectory(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_path_that_is_a_file_is_refused(path):
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be created"):
        StateDirectory(path)


@pytest.mark.parametrize("there", [True, False], ids=["there", "to-be-made"])
def test_a_file_system_that_is_mounted_read_only_is_said_to_be(path, monkeypatch, there):
    if there:
        StateDirectory(path).close()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as it answers there
    with pytest.raises(ConfigError, match="may not write"):
        StateDirectory(path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ConfigError, match="is mounted read-only; mount it for writing") as error:
        StateDirectory(path)
    assert "cannot be created" not in str(error.value)
    assert "mode 0700" not in str(error.value)


def test_the_file_system_type_is_what_stat_says(tmp_path):
    for place in (tmp_path, "/proc", "/dev"):
        told = subprocess.run(
            ["stat", "-f", "-c", "%t", place], check=True, capture_output=True, text=True
        ).stdout
        assert state_files.file_system(place) == int(told, 16)
    with pytest.raises(OSError) as missing:  # noqa: PT011 - the number is looked at below
        state_files.file_system(tmp_path / "missing")
    assert missing.value.errno == errno.ENOENT


@pytest.mark.parametrize(
    ("kind", "name"), [(0x6969, "NFS"), (0xFE534D42, "SMB2"), (0x65735546, "FUSE"), (0x01021997, "9p")]
)
def test_remote_file_systems_are_refused(path, monkeypatch, kind, name):
    monkeypatch.setattr(state_files, "file_system", lambda _: kind)
    with pytest.raises(ConfigError, match=f"lies on {name}, which cannot hold it; choose a local disk"):
        StateDirectory(path)


@pytest.mark.parametrize(("kind", "name"), [(0x01021994, "tmpfs"), (0x794C7630, "overlayfs")])
def test_passing_file_systems_are_warned_of(path, monkeypatch, caplog, kind, name):
    monkeypatch.setattr(state_files, "file_system", lambda _: kind)
    with caplog.at_level(logging.WARNING), opened(path):
        [record] = caplog.records
    assert name in record.message


def test_a_passing_file_system_is_warned_of_once_by_who_looks_before_it_holds_it(path, monkeypatch, caplog):
    monkeypatch.setattr(state_files, "file_system", lambda _: 0x01021994)
    with caplog.at_level(logging.WARNING):
        state_files.StateFiles(path).examine()
        with opened(path):
            assert len(caplog.records) == 1


def test_tenants_are_listed_removed_and_never_outside(path):
    with opened(path) as directory:
        assert list(directory.tenants()) == []
        for name in (TENANT, "ff" * 16, "ab.part", "not a tenant"):
            (path / "tenants" / name / "00000001").mkdir(parents=True)
        assert list(directory.tenants()) == [TENANT, "ff" * 16]
        assert directory.tenant(TENANT) == path / "tenants" / TENANT
        for name in ("", "..", "a/b", "AB" * 16, "a"):
            with pytest.raises(ValueError, match="not a tenant's name"):
                directory.tenant(name)
        directory.remove_tenant(TENANT)
        directory.remove_tenant(TENANT)
        assert list(directory.tenants()) == ["ff" * 16]
    with opened(path):
        assert not (path / "tenants" / "ab.part").exists(), "half removed tenants go at the next start"


def test_tenants_that_nobody_may_list_are_said_to_be(path, monkeypatch):
    def closed(_):
        raise PermissionError(errno.EACCES, "Permission denied")  # root may do all, so no mode forbids it

    with opened(path) as directory:
        monkeypatch.setattr(state_files.Path, "iterdir", closed)
        with pytest.raises(ConfigError, match="tenants: cannot be read: Permission denied; chmod 700 it"):
            list(directory.tenants())


@pytest.mark.parametrize(
    ("said", "why"),
    [("2", "says 2, and this release reads 1 to 1; run the release that wrote it")]
    + [
        (said, f"is damaged: it says {shown}, and should say a number.*no later release.*echo 1 > .*format")
        for said, shown in [
            ("", "nothing"), ("\n", "nothing"), ("one", "'one'"), ("-1", "'-1'"), ("1.0", "'1.0'"),
            ("0x1", "'0x1'"), ("0", "'0'"), ("9" * 5000, f"'{'9' * 20}'"),
        ]
    ],
)  # fmt: skip
def test_a_format_that_is_not_known_is_refused(path, said, why):
    StateDirectory(path).close()
    assert (path / "format").read_text() == "1\n"
    (path / "format").write_text(said)
    (path / "tenants" / "left.part").mkdir()
    with pytest.raises(ConfigError, match=f"{why}.*Nothing was changed"):
        StateDirectory(path)
    assert (path / "tenants" / "left.part").exists(), (
        "what is removed at a start is not what this could judge"
    )
    with pytest.raises(ConfigError, match="Nothing was changed"), at_rest(path):
        pass
    (path / "format").write_text("1")
    StateDirectory(path).close()
    assert not (path / "tenants" / "left.part").exists()
