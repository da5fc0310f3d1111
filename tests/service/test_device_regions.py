"""A daemon and an engine, two processes, and memory of a GPU between them: CUDA's, or a stand-in's in C."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support import fake_libcuda
from support.device_engine import Engine
from support.toy import BLOCK_BYTES

from kvtcd.core.device_errors import NoDriver
from kvtcd.cuda.driver import Driver
from kvtcd.lab.daemon import Daemon

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FAKE = pytest.param(
    "fake", marks=pytest.mark.skipif(not fake_libcuda.COMPILER, reason="there is no C compiler")
)
REAL = pytest.param("cuda", marks=pytest.mark.gpu)


class Host:
    """A machine with a GPU: a daemon, and what engines are started with."""

    def __init__(self, folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.environment, self._monkeypatch = environment, monkeypatch
        self.daemon = Daemon(
            folder, host=64 * BLOCK_BYTES + (1 << 20), disk=64 << 20, profiles=folder / "p", stop_seconds=20
        )
        self.set("regions", "true")

    def set(self, field: str, value: str) -> None:
        """Change a value that is false in the configuration, or that has been changed."""
        lines = self.daemon.config.read_text().splitlines()
        self.daemon.config.write_text(
            "".join(
                (f"{field} = {value}" if line in {f"{field} = false", f"{field} = true"} else line) + "\n"
                for line in lines
            )
        )

    def start(self, **environment: str) -> Daemon:
        """Start the daemon with some more in its environment."""
        with self._monkeypatch.context() as patch:
            for name, value in {**self.environment, **environment}.items():
                patch.setenv(name, value)
            self.daemon.start()
        return self.daemon

    def unpack_there(self) -> None:
        """Let the daemon's codecs work on the GPU: CUDA's, or one made of the CPU."""
        text = self.daemon.config.read_text().replace('device = "cpu"', 'device = "cuda"')
        self.daemon.config.write_text(text)
        if not self.environment:
            return
        self._monkeypatch.setenv("PYTHONPATH", self._paths)
        popen = subprocess.Popen

        def started(words, *arguments, **keywords):
            twin = ["support.twin_daemon" if word == "kvtcd" else word for word in words]
            return popen(twin, *arguments, **keywords)

        self._monkeypatch.setattr("kvtcd.lab.daemon.subprocess.Popen", started)

    @property
    def _paths(self) -> str:
        return os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))

    def engine(self, **environment: str) -> Engine:
        return Engine(
            self.daemon.socket, {**os.environ, **self.environment, **environment, "PYTHONPATH": self._paths}
        )

    def metric(self, name: str) -> float:
        import http.client  # noqa: PLC0415
        import socket  # noqa: PLC0415

        connection = http.client.HTTPConnection("kvtcd")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.daemon.socket))
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture
def host(request, tmp_path, monkeypatch):
    environment = {}
    if request.param == "fake":
        environment = {"LD_LIBRARY_PATH": str(fake_libcuda.build(tmp_path / "lib"))}
    else:
        try:
            Driver.load()
        except NoDriver as error:
            pytest.skip(str(error))
    found = Host(tmp_path / "d", environment, monkeypatch)
    yield found
    found.daemon.stop()


both = pytest.mark.parametrize("host", [FAKE, REAL], indirect=True)
fake = pytest.mark.parametrize("host", [FAKE], indirect=True)


@both
def test_blocks_go_from_one_process_to_another_and_back(host):
    host.start()
    with host.engine() as engine:
        engine.tell("register")
        assert engine.tell("share") == ["device", ""]
        for place, number in enumerate((3, 1, 4)):
            engine.tell("write", place, number)
        assert [engine.tell("put", place, n) for place, n in enumerate((3, 1, 4))] == ["stored"] * 3
        for place in range(3):
            engine.tell("write", place, None)
        assert engine.tell("fill", 4, 9, 3) == [BLOCK_BYTES, None, BLOCK_BYTES]
        assert [engine.tell("holds", place) for place in range(3)] == [4, None, 3]
        assert host.metric('kvtcd_regions{kind="device"}') == 1
        assert engine.tell("close") is None
        assert host.metric('kvtcd_regions{kind="device"}') == 0
        assert engine.tell("free") is None, "nobody holds it any more"


@both
def test_an_engine_that_is_killed_leaves_nothing_open_and_its_blocks_to_the_next(host):
    host.start()
    with host.engine() as engine:
        engine.tell("register")
        engine.tell("share")
        engine.tell("write", 0, 5)
        assert engine.tell("put", 0, 5) == "stored"
    with host.engine() as engine:
        assert engine.tell("share") == ["device", ""]
        assert engine.tell("fill", 5) == [BLOCK_BYTES]
        assert engine.tell("holds", 0) == 5
        assert host.metric('kvtcd_regions{kind="device"}') == 1


@both
def test_a_daemon_that_was_started_anew_opens_it_again(host):
    host.start()
    with host.engine() as engine:
        engine.tell("register")
        engine.tell("share")
        host.daemon.kill()
        host.start()
        engine.tell("register")
        engine.tell("write", 0, 6)
        assert engine.tell("put", 0, 6) == "stored", "through the host, since the region is not known"
        assert engine.tell("fill", 6) == [BLOCK_BYTES]
        assert engine.tell("said") == ["device", ""]
        engine.tell("write", 0, None)
        assert engine.tell("fill", 6) == [BLOCK_BYTES]
        assert engine.tell("holds", 0) == 6


@both
def test_what_is_packed_is_unpacked_in_an_engines_memory_and_nowhere_else(host):
    host.unpack_there()
    host.start()
    with host.engine() as engine:
        engine.tell("register")
        assert engine.tell("share") == ["device", ""]
        for place, number in enumerate((3, 1, 4)):
            engine.tell("write", place, number)
            engine.tell("put", place, number)
        engine.tell("demote", 3, 1, 4)
        for place in range(4):
            engine.tell("write", place, None)
        used = host.metric("kvtcd_used_bytes{")
        assert engine.tell("fill", 4, 9, 3, 1) == [BLOCK_BYTES, None, BLOCK_BYTES, BLOCK_BYTES]
        assert [engine.tell("holds", place) for place in range(4)] == [4, None, 3, 1]
        assert host.metric('kvtcd_straight_reads_total{outcome="landed",source="disk"}') == 3
        assert host.metric("kvtcd_used_bytes{") == used, "nothing raw was made on the host"
        engine.tell("write", 0, None)
    with host.engine() as engine:
        assert engine.tell("share") == ["device", ""]
        assert engine.tell("fill", 1) == [BLOCK_BYTES]
        assert engine.tell("holds", 0) == 1
        assert engine.tell("close") is None
        assert engine.tell("free") is None, "nobody holds it any more"


@fake
@pytest.mark.parametrize(
    ("daemon", "engine", "why"),
    [
        ({}, {"FAKE_CUDA_EXPANDABLE": "1"}, "expandable_segments"),
        ({"FAKE_CUDA_DEVICES": "0"}, {}, "it finds no device; see CUDA_VISIBLE_DEVICES"),
        ({"LD_LIBRARY_PATH": "/nowhere"}, {}, "Install NVIDIA's driver"),
        ({"FAKE_CUDA_FAULT": "cuIpcOpenMemHandle_v2"}, {}, "CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        (None, {}, "regions is false in [gpu]"),
    ],
)
def test_what_cannot_be_shared_goes_through_the_host_and_says_why(host, daemon, engine, why):
    if daemon is None:
        host.set("regions", "false")
    host.start(**daemon or {})
    with host.engine(**engine) as running:
        running.tell("register")
        path, said = running.tell("share")
        assert path == "region"
        assert why in said
        running.tell("write", 2, 7)
        assert running.tell("put", 2, 7) == "stored"
        assert running.tell("fill", 7, 8) == [BLOCK_BYTES, None]
        assert running.tell("holds", 0) == 7
        assert host.metric('kvtcd_regions{kind="host"}') == 1
        refused = host.metric('kvtcd_refused_regions_total{kind="device"')
        assert refused == (0 if engine else 1)


@fake
def test_a_gpu_that_fails_takes_its_regions_with_it_and_nothing_else(host):
    host.start(FAKE_CUDA_FAULT="cuMemcpyDtoHAsync_v2", FAKE_CUDA_FAULT_AFTER="1")
    with host.engine() as engine:
        engine.tell("register")
        assert engine.tell("share") == ["device", ""]
        for place in range(3):
            engine.tell("write", place, place)
        assert [engine.tell("put", place, place) for place in range(3)] == ["stored"] * 3
        path, why = engine.tell("said")
        assert path == "region"
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in why
        assert engine.tell("fill", 2, 1, 0) == [BLOCK_BYTES] * 3
        assert [engine.tell("holds", place) for place in range(3)] == [2, 1, 0]
        assert host.metric("kvtcd_failed_devices_total") == 1
        assert host.metric('kvtcd_regions{kind="device"}') == 0
        assert engine.tell("close") is None


@pytest.mark.parametrize("host", [REAL], indirect=True)
@pytest.mark.parametrize(("expandable", "way"), [(False, "device"), (True, "region")])
def test_memory_of_torch_is_shared_unless_its_segments_are_expandable(host, expandable, way):
    host.start()
    with host.engine(PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{expandable}") as engine:
        engine.tell("register")
        path, why, outcome, same = engine.tell("tensors", 11)
        assert (path, outcome, same) == (way, "stored", True)
        assert ("expandable_segments" in why) is expandable
