"""A release starts on what an earlier one left, serves the very bytes, and spares what a later one left."""

from __future__ import annotations

import importlib.util
import socket
import sys
import tarfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support.supervised import supervised

from kvtcd.admin import exports
from kvtcd.admin.store_view import command as inspect
from kvtcd.client import BlockHead, Client
from kvtcd.config import load
from kvtcd.core.errors import ConfigError
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).with_name("golden")
INSTALLS = sorted(GOLDEN.glob("*.tar.gz"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.byteorder != "little", reason="LMDB files have the byte order of their machine"),
]


def maker():
    spec = importlib.util.spec_from_file_location("make_install", GOLDEN / "make_install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = maker()


@pytest.fixture(params=INSTALLS, ids=lambda path: path.name.removesuffix(".tar.gz"))
def install(request, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as tar:
        tar.extractall(tmp_path, filter="data")
    for name in ("plain", "encrypted"):  # the filter leaves the modes of directories to the umask
        (tmp_path / name).chmod(0o700)
    return tmp_path


@contextmanager
def started(install: Path, name: str) -> Iterator[Client]:
    """Run a daemon on one of the state directories with the configuration of that time; it stops well."""
    daemon = Daemon(install, host=8 << 20, disk=64 << 20, profiles=install / "profiles")
    daemon.config.write_text((install / f"{name}.toml").read_text())
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        supervised(daemon, sockets=[("tcp", tcp)]) as running,
        Client(f"http://127.0.0.1:{tcp.getsockname()[1]}", token=MADE.TOKEN) as client,
    ):
        running.until("READY=1")
        yield client
        assert running.stop() == 0
    warned = [line for line in daemon.log.read_text().splitlines() if "WARNING" in line]
    assert all("is used, but was fitted to" in line for line in warned), "its profile is of a toy"


def served(client: Client, install: Path) -> None:
    """Compare with what was served then: exactly, but for products that round differently elsewhere."""
    for n in range(MADE.BLOCKS):
        assert bytes(client.get("exact", MADE.key(n))) == MADE.block(n)
        got = bytes(client.get("packed", MADE.key(n)))
        want = (install / "served" / f"packed-{n}.raw").read_bytes()
        values, known = (
            MADE.WORLD.values(torch.frombuffer(bytearray(each), dtype=torch.uint8), MADE.TOKENS)
            for each in (got, want)
        )
        for stream, expected in known.items():
            if n == 0:
                assert torch.equal(values[stream][:, :4], expected[:, :4])
            assert (values[stream] - expected).abs().max() < 0.02 * expected.abs().max()
        different = np.frombuffer(got, np.uint8) != np.frombuffer(want, np.uint8)
        assert different.mean() < 0.01


def test_there_is_a_golden_installation() -> None:
    assert INSTALLS


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_the_daemon_starts_on_what_an_earlier_release_left_and_serves_the_very_bytes(install, name) -> None:
    with started(install, name) as client:
        served(client, install)
        assert {each.name: each.codec.split()[0] for each in client.namespaces()} == {
            "exact": "lossless", "packed": "kvtc2",
        }  # fmt: skip
        assert client.stats()["misses"] == 0
        keys = [MADE.key(n) for n in range(MADE.BLOCKS)]
        assert len(client.match("packed", keys).prefix) == MADE.BLOCKS
        more = BlockHead(MADE.key(9), MADE.TOKENS, first_token=0)
        assert client.put("exact", more, MADE.block(9), durable=True).outcome == "stored"
    with started(install, name) as client:
        served(client, install)
        assert bytes(client.get("exact", MADE.key(9))) == MADE.block(9)


def test_a_directory_that_says_no_format_is_of_the_first(install) -> None:
    (install / "plain" / "format").unlink()
    with started(install, "plain") as client:
        served(client, install)
    assert (install / "plain" / "format").read_text() == "1\n"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_later_release_left_is_refused_and_not_a_byte_of_it_changed(install) -> None:
    (install / "plain" / "format").write_text("2\n")
    before = contents(install / "plain")
    daemon = Daemon(install, host=8 << 20, disk=64 << 20, profiles=install / "profiles")
    daemon.config.write_text((install / "plain.toml").read_text())
    with supervised(daemon) as refused:
        assert refused.ended() == 2
    assert "this release reads 1 to 1; run the release that wrote it" in daemon.log.read_text()
    assert "Traceback" not in daemon.log.read_text()
    with pytest.raises(ConfigError, match="Nothing was changed"):
        inspect(install / "plain", key=None, shown=0, verify=True, json=None)
    (key := install / "export.key").touch(0o600)
    key.write_bytes(bytes(32))
    with pytest.raises(ConfigError, match="Nothing was changed"):
        exports.command(
            "exact", load(install / "plain.toml"), tenant=None, out=install / "out", key=key, master=None
        )
    assert contents(install / "plain") == before

    (install / "plain" / "format").write_text("1\n")
    with started(install, "plain") as client:
        served(client, install)
