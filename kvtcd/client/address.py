"""Where the daemon is."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvtcd.core.errors import BadRequest, Unavailable

DEFAULT_SOCKET = "/run/kvtcd/kvtcd.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """A Unix socket, or host and port, the token for them, and what TLS trusts; None: no TLS."""

    socket: str | None
    host: str = "kvtcd"
    port: int = 80
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, text: str | Path | None, token: str | None = None, ca: str | Path | None = None) -> Address:
        """Read an address: the path of a socket, ``http://host:port``, or https; None: the default socket.

        The default is ``$KVTCD_SOCKET``, else ``/run/kvtcd/kvtcd.sock``. A token goes by TCP
        alone, and is that of ``$KVTCD_TOKEN`` if none is given. The certificate of https must lead to one in
        the file `ca`, else ``$KVTCD_CA``, else to one that the system trusts.

        Raises:
            BadRequest: a URL that is not one of a host and a port, or no file of certificates.
        """
        address = str(text) if text is not None else os.environ.get("KVTCD_SOCKET", DEFAULT_SOCKET)
        if "://" not in address:
            return cls(address)
        url = urlsplit(address)
        known, rest = url.scheme in {"http", "https"}, url.path.strip("/") or url.query
        try:
            port = url.port
        except ValueError:  # no number, or none of a port
            port = None
        if not known or not url.hostname or port is None or rest:
            raise BadRequest(
                "address", f"{address!r} is neither the path of a socket nor http(s)://host:port"
            )
        tls = _trusting(ca or os.environ.get("KVTCD_CA")) if url.scheme == "https" else None
        return cls(None, url.hostname, port, token or os.environ.get("KVTCD_TOKEN"), tls)

    def headers(self) -> dict[str, str]:
        """Return what every request has to say of its sender."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def __str__(self) -> str:
        return self.socket or f"{self.scheme}://{self.netloc}"

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "https" if self.tls else "http"

    @property
    def netloc(self) -> str:
        """Host and port as a URL has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def unavailable(self, error: OSError) -> Unavailable:
        """Return the error for a daemon that cannot be reached."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unavailable(
                f"{self} shows a certificate that cannot be trusted ({error.verify_message}); name the file "
                "of its CA in KVTCD_CA, and the host as the certificate does"
            )
        if isinstance(error, PermissionError):
            return Unavailable(f"{self} may not be used by this user; join the group that owns it")
        return Unavailable(
            f"no daemon answers on {self} ({error.strerror or error}); start `kvtcd serve`, "
            "or name its socket in KVTCD_SOCKET"
        )


def _trusting(ca: str | Path | None) -> ssl.SSLContext:
    """Return a context that checks certificate and name of a daemon."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        why = "holds no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadRequest("ca", f"{ca}: {why}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
