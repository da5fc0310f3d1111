"""What connections come in by: Unix sockets that are bound here, or that a service manager hands over.

Requests come on a stream; memory to share comes on a ``SOCK_SEQPACKET`` beside it (`api/side.py`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtcd.core.errors import AlreadyRunning, ConfigError
from kvtcd.core.regions import side_socket

DATA, TCP = "data", "tcp"
"""``FileDescriptorName`` of the Unix sockets, and of that for TCP."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket.

    Attributes:
        socket: listens.
        path: where it was bound, so that it is to be removed in the end; None if it is another's.
        inode: of `path`: a successor may have bound a socket of its own there.
    """

    socket: socket.socket
    path: Path | None = None
    inode: int = 0

    def remove(self) -> None:
        """Remove what was bound here, but not the socket of a successor, nor one that was handed over."""
        with suppress(FileNotFoundError):
            if self.path and self.path.stat().st_ino == self.inode:
                self.path.unlink()

    @property
    def shares_memory(self) -> bool:
        """Tell whether it is the side socket."""
        return self.socket.type == socket.SOCK_SEQPACKET

    def __str__(self) -> str:
        return shown(self.socket.getsockname())


def shown(address: object) -> str:
    """Write the address of a socket as people do: ``host:port``, or a path."""
    if not isinstance(address, tuple):
        return str(address)
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def adopt(name: str, found: socket.socket, *, encrypted: bool = False) -> Listener:
    """Take over a socket of a service manager: it stays, and whoever waits there, when this process ends.

    Args:
        name: its ``FileDescriptorName``.
        found: the socket.
        encrypted: TCP is encrypted, so it may be for other hosts.

    Raises:
        ConfigError: it is neither a Unix socket called `DATA`, nor one called `TCP`, which is of this host
            alone unless it is encrypted.
    """
    address = found.getsockname()
    if name == DATA and found.family == socket.AF_UNIX:
        return Listener(found)
    if name == TCP and found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM:
        if not encrypted and not ipaddress.ip_address(address[0]).is_loopback:
            why = "is not an address of this host alone; for others, name tcp.certificate and tcp.key"
            raise ConfigError("socket activation", shown(address), why)
        return Listener(found)
    why = f"is handed over as {name!r}; FileDescriptorName= must be {DATA} for a Unix socket, {TCP} for TCP"
    raise ConfigError("socket activation", shown(address), why)


def bind(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Listener:
    """Bind a Unix socket that owner and group may use.

    A socket left behind by a daemon that was killed is replaced.

    Raises:
        AlreadyRunning: somebody listens there.
        ConfigError: there is something else than a socket.
    """
    found = _state(path, kind)
    if found == "served":
        raise AlreadyRunning(path, "socket (daemon.socket)")
    if found == "left":
        path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, kind)
    # Set round the bind: a chmod after it would leave a moment in which everybody may connect.
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(path, "socket", f"cannot be bound: {error.strerror or error}") from None
    finally:
        os.umask(before)
    listener.listen(128)
    return Listener(listener, path, path.stat().st_ino)


def bind_tcp(host: str, port: int) -> Listener:
    """Bind an address of this machine.

    Raises:
        OSError: it is taken, or not to be had.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # what is left of a predecessor's connections
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(128)
    return Listener(listener)


def obstacle(path: Path) -> str | None:
    """Return why no Unix socket could be bound at a path and what to do, None where it could."""
    folder, user = path.parent, os.geteuid()
    try:
        there = stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        return (
            f"{folder} cannot be used: {error.strerror}; create it for uid {user} "
            f"(install -d -o {user} -m 0750 {folder}), or name another path in config.toml (--config)"
        )
    if not (there and os.access(folder, os.W_OK | os.X_OK)):
        return f"uid {user} may not create a socket in {folder}; name another path in config.toml (--config)"
    return None


def bind_both(path: Path) -> list[Listener]:
    """Bind the socket of the API and the side socket beside it.

    Raises:
        AlreadyRunning, ConfigError: see `bind`.
    """
    data = bind(path)
    try:
        return [data, bind(Path(side_socket(str(path))), socket.SOCK_SEQPACKET)]
    except BaseException:
        data.socket.close()
        data.remove()
        raise


def examine_both(path: Path) -> bool:
    """Refuse what `bind_both` would, but for `obstacle`; tell whether somebody listens there now.

    Raises:
        ConfigError: something else than a socket is there.
    """
    sockets = [(path, socket.SOCK_STREAM), (Path(side_socket(str(path))), socket.SOCK_SEQPACKET)]
    listening = [_state(each, kind) == "served" for each, kind in sockets]
    return any(listening)


def _state(path: Path, kind: socket.SocketKind) -> Literal["free", "left", "served"]:
    """Say what is at a path: nothing, a socket that was left behind, or one that somebody listens on.

    Raises:
        ConfigError: it is something else, or nobody of ours may ask.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "free"
    except OSError as error:
        raise ConfigError(path, "socket", f"cannot be looked at: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(path, "socket", "is taken by something that is not a socket")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return "left"
        except OSError as error:
            why = f"is taken by a socket that cannot be connected to: {error.strerror}"
            raise ConfigError(path, "socket", why) from None
    return "served"
