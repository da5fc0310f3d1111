"""Where the daemon is."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvtcd.core.errors import BadRequest, Unavailable

DEFAULT_SOCKET = "/run/kvtcd/kvtcd.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """A Unix socket, or host and port, and the token for them."""

    socket: str | None
    host: str = "kvtcd"
    port: int = 80
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, text: str | Path | None, token: str | None = None) -> Address:
        """Read an address: the path of a socket or ``http://host:port``; None: the default socket.

        The default is ``$KVTCD_SOCKET``, else ``/run/kvtcd/kvtcd.sock``. A token goes by TCP
        alone, and is that of ``$KVTCD_TOKEN`` if none is given.

        Raises:
            BadRequest: a URL that is not one of a host and a port.
        """
        address = str(text) if text is not None else os.environ.get("KVTCD_SOCKET", DEFAULT_SOCKET)
        if "://" not in address:
            return cls(address)
        url = urlsplit(address)
        if url.scheme != "http" or not url.hostname or url.port is None or url.path.strip("/") or url.query:
            raise BadRequest("address", f"{address!r} is neither the path of a socket nor http://host:port")
        return cls(None, url.hostname, url.port, token or os.environ.get("KVTCD_TOKEN"))

    def headers(self) -> dict[str, str]:
        """Return what every request has to say of its sender."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def __str__(self) -> str:
        return self.socket or f"http://{self.host}:{self.port}"

    def unavailable(self, error: OSError) -> Unavailable:
        """Return the error for a daemon that cannot be reached."""
        if isinstance(error, PermissionError):
            return Unavailable(f"{self} may not be used by this user; join the group that owns it")
        return Unavailable(
            f"no daemon answers on {self} ({error.strerror or error}); start `kvtcd serve`, "
            "or name its socket in KVTCD_SOCKET"
        )
