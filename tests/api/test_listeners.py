"""What connections come in by: what is taken over from a service manager, and what is refused."""

from __future__ import annotations

import os
import socket

import pytest

from kvtcd.api.listeners import DATA, TCP, adopt, bind_tcp, obstacle
from kvtcd.core.errors import ConfigError


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as local:
        local.bind("s")
        local.listen()
        yield local


@pytest.fixture
def tcp():
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        yield tcp


def test_what_is_taken_over_is_left_where_it_is(tmp_path, local, tcp) -> None:
    for listener in (adopt(DATA, local), adopt(TCP, tcp)):
        listener.remove()
    assert (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["", "side", "tcp"])
def test_a_unix_socket_of_another_name_is_refused(local, name) -> None:
    with pytest.raises(ConfigError, match="must be data for a Unix socket"):
        adopt(name, local)


def test_a_tcp_socket_is_not_taken_for_that_of_data(tcp) -> None:
    with pytest.raises(ConfigError, match="tcp for TCP"):
        adopt(DATA, tcp)


def test_a_tcp_socket_that_other_hosts_reach_is_refused() -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,  # noqa: S104 - refused
        pytest.raises(ConfigError, match="this host alone"),
    ):
        adopt(TCP, everywhere)


def test_an_address_that_is_taken_cannot_be_bound(tcp) -> None:
    with pytest.raises(OSError, match="in use"):
        bind_tcp(*tcp.getsockname())


def test_what_is_in_the_way_of_a_socket_names_the_folder_and_what_to_do(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "run"
    assert f"install -d -o {os.geteuid()} -m 0750 {folder}" in obstacle(folder / "kvtcd.sock")
    folder.mkdir()
    assert obstacle(folder / "kvtcd.sock") is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may do all, so no mode forbids it  # noqa: ARG005
    assert f"may not create a socket in {folder}" in obstacle(folder / "kvtcd.sock")
    (tmp_path / "file").touch()
    assert "may not create a socket" in obstacle(tmp_path / "file" / "kvtcd.sock")
