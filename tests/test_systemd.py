"""What a service manager hands over and is told, held against its documents."""

from __future__ import annotations

import os
import socket

import pytest
from support.patience import PATIENCE_S

from kvtcd.core.errors import ConfigError
from kvtcd.systemd import Supervisor, credential, inherited


@pytest.fixture
def inbox():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.settimeout(PATIENCE_S)
        yield inbox


@pytest.mark.parametrize("address", ["{folder}/notify", "@kvtcd-test-{pid}"])
def test_a_message_is_one_datagram_of_lines_to_a_path_or_an_abstract_name(tmp_path, inbox, address) -> None:
    address = address.format(folder=tmp_path, pid=os.getpid())
    inbox.bind(address.replace("@", "\0"))
    supervisor = Supervisor({"NOTIFY_SOCKET": address})
    supervisor.tell("READY=1", "MAINPID=1", status="two\nlines")
    supervisor.close()
    supervisor.tell("READY=1")

    assert inbox.recv(4096) == b"READY=1\nMAINPID=1\nSTATUS=two lines"
    inbox.setblocking(False)
    with pytest.raises(BlockingIOError):
        inbox.recv(4096)


def test_without_a_manager_or_after_its_death_nothing_fails(tmp_path, inbox, caplog) -> None:
    Supervisor({}).tell("READY=1")
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).tell("READY=1")
    inbox.bind(str(tmp_path / "notify"))
    left = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    inbox.close()
    left.tell("READY=1")
    left.close()

    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_counts_if_it_is_this_process_that_it_watches(environment, seconds) -> None:
    assert Supervisor(environment).watchdog == seconds


def test_sockets_for_another_process_are_left_alone() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "data"}

    assert inherited(environment) == []
    assert environment == {}, "nor are they for a child"


def test_a_credential_is_a_file_and_its_absence_is_no_error(tmp_path) -> None:
    (tmp_path / "kvtcd.master-key").write_bytes(b"\0key\n")
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}

    assert credential(environment, "kvtcd.master-key") == b"\0key\n"
    assert credential(environment, "kvtcd.tokens") is None
    assert credential({}, "kvtcd.master-key") is None
    (tmp_path / "kvtcd.tokens").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        credential(environment, "kvtcd.tokens")
