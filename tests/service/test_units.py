"""The units: what systemd says of them, that they fit the daemon, and that it can work under them."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from socket import AF_UNIX, SOCK_DGRAM, SOCK_SEQPACKET, SOCK_STREAM, socket

import pytest
from support.patience import PATIENCE_S
from support.supervised import listening, supervised
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY

from kvtcd import cli, config
from kvtcd.api import listeners
from kvtcd.client import BlockHead, Client
from kvtcd.config.remote import CREDENTIAL
from kvtcd.core.errors import AlreadyRunning, ConfigError
from kvtcd.core.keys import EngineKey
from kvtcd.core.regions import side_socket
from kvtcd.entrance import TOKENS
from kvtcd.lab.daemon import Daemon
from kvtcd.tiers.state import MASTER_KEY

UNITS = Path(__file__).parents[2] / "systemd"
DROP_INS = sorted((UNITS / "drop-ins").glob("*.conf"))
analyzes = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")


def settings(*files: Path) -> dict[str, list[str]]:
    """Read unit files as systemd does: a list of values for each key, which an empty value empties."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files:
        for line in path.read_text().splitlines():
            if line and line[0] not in "#[":
                name, value = line.split("=", 1)
                found[name] = [*found[name], value] if value else []
    return found


SERVICE = settings(UNITS / "kvtcd.service")


@pytest.fixture(params=[None, *DROP_INS], ids=lambda path: path.stem if path else "alone")
def folder(request, tmp_path: Path) -> Path:
    """Return a folder of our units, with one drop-in at most."""
    for unit in UNITS.glob("kvtcd*.*"):
        shutil.copy(unit, tmp_path)
    if request.param:
        (tmp_path / "kvtcd.service.d").mkdir()
        shutil.copy(request.param, tmp_path / "kvtcd.service.d")
    return tmp_path


def analyze(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


@analyzes
def test_systemd_has_nothing_to_say_of_the_units_but_that_nothing_is_installed(folder: Path) -> None:
    units = [f"./{unit.name}" for unit in folder.glob("kvtcd*.*") if unit.is_file()]
    said = analyze("verify", "--man=no", *units, cwd=folder)

    programs = [line.lstrip("+-").split()[0] for line in unit_programs(folder)]
    absent = {
        f"kvtcd.service: Command {name} is not executable: No such file or directory" for name in programs
    }
    assert set(said.stderr.splitlines()) <= absent
    assert said.stdout == ""


def unit_programs(folder: Path) -> list[str]:
    found = settings(*folder.rglob("*.service"), *folder.rglob("*.conf"))
    return found["ExecStart"] + found["ExecStartPre"]


@analyzes
def test_a_wrong_line_is_seen(folder: Path) -> None:
    with (folder / "kvtcd.service").open("a") as unit:
        unit.write("\n[Service]\nProtectEverything=yes\n")
    assert "ProtectEverything" in analyze("verify", "--man=no", "./kvtcd.service", cwd=folder).stderr


@analyzes
def test_the_exposure_is_small_and_smaller_without_a_network(folder: Path) -> None:
    alone = (folder / "kvtcd.service.d" / "socket-only.conf").exists()
    said = analyze(
        "security", "--offline=true", f"--threshold={10 if alone else 20}", "./kvtcd.service", cwd=folder
    )

    assert said.returncode == 0, said.stdout.splitlines()[-1]


def test_the_units_fit_the_defaults_of_the_daemon() -> None:
    defaults, socket = config.load(None), settings(UNITS / "kvtcd.socket")
    assert socket["ListenStream"] == [str(defaults.daemon.socket)]
    assert socket["ListenSequentialPacket"] == [side_socket(str(defaults.daemon.socket))]
    assert socket["FileDescriptorName"] == [listeners.DATA]
    assert settings(UNITS / "kvtcd-tcp.socket")["FileDescriptorName"] == [listeners.TCP]
    assert SERVICE["RuntimeDirectory"] == [defaults.daemon.socket.parent.name]
    assert SERVICE["RuntimeDirectoryPreserve"] == ["yes"], "else the socket goes with each stop"
    assert Path("/var/lib", SERVICE["StateDirectory"][0]) == defaults.daemon.state
    assert SERVICE["LoadCredential"] == [MASTER_KEY, TOKENS, CREDENTIAL]
    assert float(SERVICE["TimeoutStopSec"][0]) > defaults.daemon.stop_seconds
    lasting = {cli.EXIT_CODES[ConfigError], cli.EXIT_CODES[AlreadyRunning]}
    assert set(map(int, SERVICE["RestartPreventExitStatus"][0].split())) == lasting


@pytest.mark.skipif(not shutil.which("systemd-sysusers"), reason="no systemd-sysusers here")
def test_the_user_of_the_units_is_the_one_that_sysusers_makes(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", "--dry-run", str(UNITS / "sysusers.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if "unrecognized option" in done.stderr:
        pytest.skip("its systemd knows no --dry-run")
    assert done.returncode == 0, done.stderr
    fields = (UNITS / "sysusers.conf").read_text().splitlines()[-1].split()
    assert [fields[1]] == SERVICE["User"] == SERVICE["Group"]
    assert Path(fields[-1]) == config.load(None).daemon.state


def allowed() -> set[str]:
    """Return the system calls that the unit lets through, by systemd's own lists."""

    def expand(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        listing = analyze("syscall-filter", name, cwd=UNITS).stdout
        names = re.findall(r"^ {4}(\S+)$", listing, re.MULTILINE)
        return set().union(*map(expand, names))

    calls: set[str] = set()
    for line in SERVICE["SystemCallFilter"]:
        listed = set().union(*map(expand, line.removeprefix("~").split()))
        calls = calls - listed if line.startswith("~") else calls | listed
    return calls


CONFINED = """
import ctypes
libc = ctypes.CDLL("libseccomp.so.2")
libc.seccomp_init.restype = ctypes.c_void_p
libc.seccomp_init.argtypes = [ctypes.c_uint32]
libc.seccomp_load.argtypes = [ctypes.c_void_p]
libc.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
refuse_with_eperm, allow = 0x00050001, 0x7FFF0000
rules = libc.seccomp_init(refuse_with_eperm)
for name in {calls!r}:
    number = libc.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:
        assert libc.seccomp_rule_add(rules, allow, number, 0) == 0
assert libc.seccomp_load(rules) == 0
import os, torch
try:
    os.chroot("/")
except PermissionError:
    print("confined", flush=True)
for dtype in (torch.float32, torch.bfloat16):
    torch.randn(256, 256).to(dtype) @ torch.randn(256, 256).to(dtype)
"""


@analyzes
@pytest.mark.slow
@pytest.mark.skipif(not ctypes.util.find_library("seccomp"), reason="no libseccomp here")
def test_the_daemon_can_do_its_work_with_the_system_calls_that_the_unit_allows(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, host=64 * BLOCK_BYTES + (1 << 20), disk=256 << 20, profiles=tmp_path / "p")
    prelude = CONFINED.format(calls=sorted(allowed()))
    for start in range(2):
        with supervised(daemon, prelude=prelude) as running, running.client() as client:
            running.until("READY=1")
            if start == 0:
                client.register("n", IDENTITY)
                head = BlockHead(EngineKey(b"k" * 32), tokens=BLOCK_TOKENS, first_token=0)
                assert client.put("n", head, bytes(BLOCK_BYTES), durable=True).outcome == "stored"
            assert bytes(client.get("n", EngineKey(b"k" * 32))) == bytes(BLOCK_BYTES)
            assert client.reload_policies()
            assert running.stop() == 0
    log = daemon.log.read_text()
    assert log.count("confined") == 2
    assert "Operation not permitted" not in log


COMPILED = """
import os, sys
os.umask(0o077)
from triton.runtime.build import compile_module_from_src
source = '''
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
'''
print(compile_module_from_src(source, "launcher").__file__)
from support.compiled_kernels import arithmetic
from kvtcd.codec import kernels
print(arithmetic(kernels._count, 90))
"""
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")


def compiled(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Do what Triton does for the first launch, but for the launch: a C compiler, ptxas, and a folder."""
    own = {name: value for name, value in os.environ.items() if name not in {"CC", "TRITON_INTERPRET"}}
    own |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    return subprocess.run(
        [sys.executable, "-c", CONFINED.format(calls=sorted(allowed())) + COMPILED],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=own | environment,
    )  # fmt: skip


@analyzes
@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(not ctypes.util.find_library("seccomp"), reason="no libseccomp here")
def test_kernels_can_be_compiled_with_the_system_calls_that_the_unit_allows(tmp_path: Path) -> None:
    done = compiled(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "confined" in done.stdout
    assert f"{tmp_path}/triton" in done.stdout, "and loaded from there"


@analyzes
@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(not ctypes.util.find_library("seccomp"), reason="no libseccomp here")
def test_without_a_compiler_triton_says_so(tmp_path: Path) -> None:
    """Then torch does the work: `fused.load`, tested beside the kernels."""
    done = compiled(tmp_path, PATH=str(tmp_path))
    assert done.returncode
    assert "C compiler" in done.stderr


def test_a_host_with_a_gpu_has_a_folder_for_kernels_that_the_unit_lets_write() -> None:
    gpu = settings(UNITS / "drop-ins" / "gpu.conf")
    (cache,) = gpu["CacheDirectory"]
    assert f"TRITON_CACHE_DIR=/var/cache/{cache}/triton" in gpu["Environment"]
    assert not {"MemoryDenyWriteExecute", "NoExecPaths"} & {*SERVICE, *gpu}, (
        "what is compiled there is loaded"
    )


@pytest.mark.slow
def test_a_daemon_takes_every_socket_of_the_socket_units_at_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, host=1 << 20, disk=0, profiles=tmp_path / "p")
    kinds = {"ListenStream": SOCK_STREAM, "ListenSequentialPacket": SOCK_SEQPACKET}
    unit = settings(UNITS / "kvtcd.socket")
    with ExitStack() as kept:
        sockets = [
            (unit["FileDescriptorName"][0], kept.enter_context(listening(tmp_path / Path(path).name, kind)))
            for key, kind in kinds.items()
            for path in unit[key]
        ]
        assert len(sockets) == sum(len(values) for key, values in unit.items() if key.startswith("Listen"))
        with supervised(daemon, sockets=sockets) as running, running.client() as client:
            running.until("READY=1")
            region = client.region(1 << 16)
            assert region.path == "region"
            region.close()
            assert running.stop() == 0


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="no systemd-socket-activate here")
def test_systemd_itself_can_hand_over_the_socket(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, host=1 << 20, disk=0, profiles=tmp_path / "p")
    (line,) = SERVICE["ExecStart"]
    program, *arguments = line.split()
    assert Path(program).name == "kvtcd"
    command = [sys.executable, "-m", "kvtcd", *arguments[:-1], str(daemon.config)]
    activator = [
        "systemd-socket-activate",
        f"--listen={daemon.socket}",
        f"--fdname={listeners.DATA}",
        "--setenv=NOTIFY_SOCKET",
        *command,
    ]
    with socket(AF_UNIX, SOCK_DGRAM) as inbox, daemon.log.open("ab") as log:
        inbox.bind(str(tmp_path / "notify"))
        inbox.settimeout(PATIENCE_S)
        environment = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with subprocess.Popen(activator, stdout=log, stderr=log, env=environment) as process:
            try:
                with Client(daemon.socket) as client:
                    # Who comes first once somebody listens starts it, and waits; the file is there before.
                    while not client.ready():
                        assert process.poll() is None
                        time.sleep(0.05)
                    heard = [inbox.recv(4096).decode().split("\n")]
                    while "READY=1" not in heard[-1]:
                        heard.append(inbox.recv(4096).decode().split("\n"))
                    assert client.stats()["blocks"] == 0
            finally:
                process.terminate()
            while "STOPPING=1" not in heard[-1]:
                heard.append(inbox.recv(4096).decode().split("\n"))
        assert process.returncode == 0
    assert daemon.socket.exists(), "it is not the daemon's to remove"
