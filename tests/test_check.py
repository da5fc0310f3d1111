"""`kvtcd check` refuses what `kvtcd serve` refuses, in its words; it leaves nothing and disturbs nobody."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.authority import Authority
from support.faults import unreadable
from support.patience import PATIENCE_S
from support.ports import free_port
from typer.testing import CliRunner

from kvtcd import bootstrap, cli, config, machine
from kvtcd.check import examine
from kvtcd.core.errors import ConfigError, KvtcdError
from kvtcd.core.keys import TenantKeys
from kvtcd.core.regions import side_socket
from kvtcd.engine.namespaces import TENANT_NAME
from kvtcd.lab.daemon import Daemon
from kvtcd.serve import serve
from kvtcd.tiers.disk import Environment
from kvtcd.tiers.state import MASTER_KEY, StateDirectory

TOKEN = f'[[token]]\nsha256 = "{"a" * 64}"\ntenant = "t"\n'


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    """What a daemon sets for its whole process, and no service manager."""
    os.umask(0o077)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


class Site:
    """A folder with a configuration that is right, until something is put wrong."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.state, self.socket = folder / "state", folder / "run" / "kvtcd.sock"
        self.socket.parent.mkdir()
        self.policies: list[str] = []
        self.held: socket.socket | None = None
        self.tables = {
            "daemon": {"state": str(self.state), "socket": str(self.socket)},
            "host": {"capacity": "4MiB"}, "disk": {"capacity": "64MiB"},
        }  # fmt: skip

    def say(self, table: str, **values: object) -> None:
        self.tables.setdefault(table, {}).update(values)

    def file(self, name: str, text: str = "", mode: int = 0o600) -> str:
        path = self.folder / name
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    def stored(self) -> StateDirectory:
        """Make a state directory as a daemon leaves it."""
        state = StateDirectory(self.state)
        state.master_key()
        state.close()
        return state

    def credential(self, name: str, content: bytes) -> None:
        folder = self.folder / "credentials"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        self.patch.setenv("CREDENTIALS_DIRECTORY", str(folder))

    @property
    def config(self) -> Path:
        path = self.folder / "config.toml"
        lines = [f"policies = {self.policies}"]
        for table, values in self.tables.items():
            lines += [f"[{table}]", *(f"{name} = {shown(value)}" for name, value in values.items())]
        path.write_text("\n".join(lines) + "\n")
        return path

    def tree(self) -> dict[str, tuple[int, int, int]]:
        stats = {str(path): path.lstat() for path in self.folder.rglob("*")}
        return {name: (stat.st_mode, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


@pytest.fixture
def site(tmp_path: Path, monkeypatch) -> Site:
    made = Site(tmp_path, monkeypatch)
    yield made
    if made.held:
        made.held.close()


def no_tokens(site: Site) -> None:
    site.say("tcp", listen=f"127.0.0.1:{free_port()}", tokens=str(site.folder / "missing.toml"))


def wrong_tokens(site: Site) -> None:
    site.say("tcp", listen=f"127.0.0.1:{free_port()}", tokens=site.file("tokens.toml", "token = []\n"))


def wrong_tokens_as_a_credential(site: Site) -> None:
    site.say("tcp", listen=f"127.0.0.1:{free_port()}", tokens=str(site.folder / "missing.toml"))
    site.credential("kvtcd.tokens", b"nonsense")


def tokens_that_others_may_write(site: Site) -> None:
    path = site.file("tokens.toml", TOKEN, 0o664)
    site.say("tcp", listen=f"127.0.0.1:{free_port()}", tokens=path)


def tokens_of_somebody_else(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = site.file("tokens.toml", TOKEN)
    os.chown(path, 1234, -1)
    site.say("tcp", listen=f"127.0.0.1:{free_port()}", tokens=path)


def no_certificate(site: Site) -> None:
    site.say("tcp", listen=f"127.0.0.1:{free_port()}", tokens=site.file("tokens.toml", TOKEN))
    site.say("tcp", certificate=str(site.folder / "no.pem"), key=str(site.folder / "no.key"))


def key_that_all_may_read(site: Site) -> None:
    certificate, key = Authority(site.folder).issue("localhost")
    key.chmod(0o644)
    site.say("tcp", listen=f"127.0.0.1:{free_port()}", tokens=site.file("tokens.toml", TOKEN))
    site.say("tcp", certificate=str(certificate), key=str(key))


def port_that_is_taken(site: Site) -> None:
    taken = site.held = socket.create_server(("127.0.0.1", 0))
    site.say("tcp", listen=f"127.0.0.1:{taken.getsockname()[1]}", tokens=site.file("tokens.toml", TOKEN))


def address_of_another_host(site: Site) -> None:
    certificate, key = Authority(site.folder).issue("localhost")
    site.say("tcp", listen="192.0.2.1:7337", tokens=site.file("tokens.toml", TOKEN))
    site.say("tcp", certificate=str(certificate), key=str(key))


def no_policy(site: Site) -> None:
    site.policies = ["missing.toml"]


def no_credentials(site: Site) -> None:
    site.say("remote", url="redis://127.0.0.1:1/0", credentials=str(site.folder / "missing.toml"))


def credentials_that_others_may_read(site: Site) -> None:
    path = site.file("remote.toml", 'password = "x"\n', 0o644)
    site.say("remote", url="redis://127.0.0.1:1/0", credentials=path)


def no_authority(site: Site) -> None:
    site.say("remote", url="rediss://127.0.0.1:1/0", authority=str(site.folder / "missing.pem"))


def no_client_library(site: Site) -> None:
    site.say("remote", url="s3://bucket/prefix")
    site.patch.setitem(sys.modules, "obstore", None)
    site.patch.delitem(sys.modules, "kvtcd.tiers.remote.s3_store", raising=False)


def damaged_ledger(site: Site) -> None:
    site.stored()
    (site.state / "remote").write_bytes(b"nonsense")
    site.say("remote", url="redis://127.0.0.1:1/0")


def no_tracing(site: Site) -> None:
    site.say("tracing", endpoint="http://127.0.0.1:1")
    site.patch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    site.patch.delitem(sys.modules, "kvtcd.api.tracing", raising=False)


def no_zeromq(site: Site) -> None:
    site.say("events", zmq=f"tcp://127.0.0.1:{free_port()}", tenant="uid:1")
    site.patch.setitem(sys.modules, "zmq.asyncio", None)


def endpoint_that_cannot_be(site: Site) -> None:
    site.say("events", zmq=f"ipc://{site.folder}/missing/events", tenant="uid:1")


def no_folder_for_the_socket(site: Site) -> None:
    site.socket.parent.rmdir()


def folder_that_is_none(site: Site) -> None:
    site.socket.parent.rmdir()
    site.file("run")


def no_socket_but_a_file(site: Site) -> None:
    site.socket.touch()


def no_side_socket_but_a_file(site: Site) -> None:
    Path(side_socket(str(site.socket))).touch()


def state_below_a_file(site: Site) -> None:
    site.say("daemon", state=site.file("plain") + "/state")


def state_where_the_kernel_alone_makes_files(site: Site) -> None:
    site.say("daemon", state="/proc/state")


def state_that_is_a_file(site: Site) -> None:
    site.file("state")


def state_that_others_may_enter(site: Site) -> None:
    site.stored()
    site.state.chmod(0o755)


def state_of_somebody_else(site: Site) -> None:
    site.stored()
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(site.state, 1234, -1)


def state_of_a_later_release(site: Site) -> None:
    site.stored()
    (site.state / "format").write_text("99\n")


def state_over_the_network(site: Site) -> None:
    site.patch.setattr("kvtcd.tiers.state_files.file_system", lambda _: 0x6969)


def key_of_another_size(site: Site) -> None:
    site.stored()
    (site.state / "master.key").write_bytes(b"short")


def key_that_is_lost(site: Site) -> None:
    state = site.stored()
    state.tenant("ab").mkdir()
    (site.state / "master.key").unlink()


def key_that_differs(site: Site) -> None:
    site.stored()
    site.credential(MASTER_KEY, b"k" * 32)


def key_of_another_store(site: Site) -> None:
    state = StateDirectory(site.state)
    keys = TenantKeys.derive(state.master_key(), "uid:1")
    environment = Environment(state.tenant(keys.tag.hex()), quota=1 << 24)
    environment.put_namespace(TENANT_NAME, b"uid:1")
    environment.close()
    state.close()
    (site.state / "master.key").write_bytes(b"k" * 32)


def too_much_memory(site: Site) -> None:
    site.say("host", capacity="32TiB")


def no_gpu(site: Site) -> None:
    site.patch.setattr(torch.cuda, "device_count", lambda: 0)
    site.say("codec", device="cuda")


def more_connections_than_open_files(site: Site) -> None:
    site.say("limits", connections=1 << 40)


FAULTS: list[Callable[[Site], None]] = [
    no_policy, no_tokens, wrong_tokens, tokens_that_others_may_write, tokens_of_somebody_else,
    wrong_tokens_as_a_credential, no_certificate, key_that_all_may_read,
    port_that_is_taken, address_of_another_host, no_credentials, credentials_that_others_may_read,
    no_authority, no_client_library, damaged_ledger, no_tracing, no_zeromq, endpoint_that_cannot_be,
    no_folder_for_the_socket, folder_that_is_none, no_socket_but_a_file, no_side_socket_but_a_file,
    state_below_a_file, state_that_is_a_file, state_that_others_may_enter, state_of_somebody_else,
    state_of_a_later_release, state_over_the_network, key_of_another_size, key_that_is_lost,
    state_where_the_kernel_alone_makes_files,
    key_that_differs, key_of_another_store, too_much_memory, no_gpu, more_connections_than_open_files,
]  # fmt: skip


async def started(settings: config.Config) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await serve(settings)


def test_what_is_right_is_said_to_be_and_nothing_is_made(site: Site) -> None:
    path = site.config
    before = site.tree()
    answer = CliRunner().invoke(cli.app, ["check", "--config", str(path)])

    assert answer.exit_code == 0, answer.exception
    assert "# policies in effect: balanced" in answer.stdout
    assert site.tree() == before
    assert not site.state.exists()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_a_start_refuses_is_refused_in_the_same_words_and_nothing_is_made(site: Site, fault) -> None:
    fault(site)
    settings = config.load(site.config)
    before = site.tree()
    with pytest.raises(KvtcdError) as checked:
        list(examine(settings))
    assert site.tree() == before
    with pytest.raises(KvtcdError) as served:
        asyncio.run(started(settings))

    assert type(checked.value) is type(served.value) is ConfigError
    assert str(checked.value) == str(served.value)


def test_beside_a_daemon_that_runs_all_is_well_and_it_goes_on(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKEN)
    tcp = config.daemon.Tcp(listen=f"127.0.0.1:{free_port()}", tokens=tokens)
    with Daemon(tmp_path / "d", host=4 << 20, disk=64 << 20, profiles=profiles, tcp=tcp) as daemon:
        answer = CliRunner().invoke(cli.app, ["check", "--config", str(daemon.config)])
        assert answer.exit_code == 0, answer.exception
        assert f"uses {tmp_path / 'd' / 'state'} now" in answer.stdout
        with daemon.client() as client:
            assert client.ready()
    assert "tokens: 1" in answer.stdout


def test_the_size_of_a_small_device_is_said(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=24 << 20))
    (doubt,) = machine.doubts(config.load(site.config))
    assert "has 24.0 MiB in all" in doubt


def test_more_disk_than_the_device_has_is_noted_and_no_fault(site: Site, caplog) -> None:
    site.say("disk", capacity="60TiB")
    (note,) = [each for each in examine(config.load(site.config)) if "in all" in each]
    assert note.startswith("[disk] capacity is 60 TiB, and the device of")

    async def begun() -> None:
        async with bootstrap.service(config.load(site.config)):
            pass

    asyncio.run(begun())
    assert note in caplog.messages


def test_a_store_goes_on_without_a_disk_tier(site: Site) -> None:
    key_of_another_store(site)
    site.say("disk", capacity=0)

    async def begun() -> None:
        async with bootstrap.service(config.load(site.config)) as service:
            assert service.ready

    list(examine(config.load(site.config)))
    asyncio.run(begun())
    assert len(list((site.state / "tenants").iterdir())) == 1


def test_a_tenant_that_cannot_be_read_and_one_of_another_key_are_named(site: Site) -> None:
    state = StateDirectory(site.state)
    for master in (state.master_key(), b"k" * 32):
        for name in ("uid:1", "uid:2"):
            keys = TenantKeys.derive(master, name)
            environment = Environment(state.tenant(keys.tag.hex()), quota=1 << 24)
            environment.put_namespace(TENANT_NAME, name.encode())
            environment.close()
    unreadable(broken := state.tenant(TenantKeys.derive(state.master_key(), "uid:2").tag.hex()))
    state.close()
    settings = config.load(site.config)
    before = site.tree()
    notes = list(examine(settings))

    assert site.tree() == before
    (said,) = [each for each in notes if "cannot be read" in each]
    assert str(broken) in said
    (said, _) = [each for each in notes if "another master key" in each]
    assert "MB) of uid:" in said


def test_a_socket_that_a_service_manager_listens_on_is_no_fault(site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(site.socket))
        listening.listen()
        (note,) = [each for each in examine(config.load(site.config)) if "listens" in each]
        assert "its service manager" in note
        assert site.socket.exists()


def test_a_folder_that_may_not_be_written_to_is_refused(site: Site, monkeypatch) -> None:
    access = os.access
    for folder in (site.folder, site.socket.parent):
        with monkeypatch.context() as patched:
            patched.setattr(
                os,
                "access",
                lambda path, mode, folder=folder, **how: path != folder and access(path, mode, **how),
            )  # root may do all, so no mode forbids it
            with pytest.raises(ConfigError, match="may not"):
                list(examine(config.load(site.config)))


def test_that_somebody_looks_does_not_keep_a_daemon_from_its_state(site: Site) -> None:
    site.stored()
    with (site.state / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        list(examine(config.load(site.config)))
    StateDirectory(site.state).close()


def test_what_is_refused_is_refused_before_torch_is_loaded(site: Site) -> None:
    """On a machine that is busy that takes half a minute."""
    site.say("daemon", socket=str(site.folder / "none" / "kvtcd.sock"))
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom kvtcd import config, serve\n"
        "try:\n    asyncio.run(serve.serve(config.load(Path(sys.argv[1]))))\n"
        "except serve.ConfigError as error:\n    print(error, 'torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(site.config)], capture_output=True, text=True, check=True
    )
    assert "cannot be used: No such file or directory" in answer.stdout
    assert answer.stdout.split()[-1] == "False"
