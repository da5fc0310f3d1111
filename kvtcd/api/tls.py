"""TLS of those who come by TCP: a certificate and its key, and the names that the certificate is for."""

from __future__ import annotations

import logging
import os
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from kvtcd.core.errors import ConfigError

_log = logging.getLogger(__name__)
SOON = timedelta(days=14)
"""A certificate that ends within this time is warned of."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was read of a certificate: it fits its key.

    Attributes:
        names: host names and addresses that it is for, as `Host` has them; ``*.`` stands for one label.
        ends: when it is no longer valid.
    """

    names: frozenset[str]
    ends: datetime


class Tls:
    """What connections are encrypted with, TLS 1.2 or 1.3.

    Args:
        certificate: PEM file with the certificate, and behind it those that lead to its root.
        key: PEM file with its private key, which nobody but the owner and his group may read.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self.context, self._current = _context(), self.read()
        self.take(self._current)

    def read(self) -> Certificate:
        """Look at the files as they are now; nothing changes by it.

        Raises:
            ConfigError: see the class.
        """
        self._load(_context())
        try:
            leaf = x509.load_pem_x509_certificates(self._certificate.read_bytes())[0]
        except (OSError, ValueError) as error:
            raise ConfigError(self._certificate, "", f"is no certificate in PEM: {error}") from None
        found = Certificate(_names(leaf), leaf.not_valid_after_utc)
        if not found.names:
            why = "names no host (subjectAltName), so no client could tell whether it is the right one"
            raise ConfigError(self._certificate, "", why)
        return found

    def take(self, found: Certificate) -> None:
        """Let the files that were read hold for connections from now on.

        Raises:
            ConfigError: they have changed since, and are wrong now; what held before goes on to hold.
        """
        self._load(self.context)
        self._current = found
        if (left := found.ends - datetime.now(UTC)) < SOON:
            ends = "has ended" if left < timedelta(0) else f"ends within {left.days + 1} days"
            _log.warning("the certificate %s %s, on %s", self._certificate, ends, found.ends)

    @property
    def ends(self) -> datetime:
        """When the certificate is no longer valid."""
        return self._current.ends

    def speaks_for(self, host: str, port: int) -> bool:
        """Tell whether the certificate is for what a request names as its ``Host``."""
        name = host.removesuffix(f":{port}").lower()
        if name == host.lower() and port != 443:
            return False
        return name in self._current.names or "*." + name.partition(".")[2] in self._current.names

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            mode = stat.S_IMODE(self._key.stat().st_mode)
            if mode & 0o007:
                raise ConfigError(self._key, "", f"everybody may read it (mode {mode:04o}); chmod 640 it")
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            why = f"is not the certificate of the key {self._key}, or one of them is no PEM, or is encrypted"
            raise ConfigError(self._certificate, "", f"{why} ({error.reason})") from None
        except OSError as error:
            missing = self._certificate if not os.access(self._certificate, os.R_OK) else self._key
            raise ConfigError(missing, "", f"cannot be read: {error.strerror}") from None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _names(leaf: x509.Certificate) -> frozenset[str]:
    try:
        held = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = held.get_values_for_type(x509.IPAddress)
    return frozenset(
        [name.lower() for name in held.get_values_for_type(x509.DNSName)]
        + [f"[{each}]" if each.version == 6 else str(each) for each in addresses]
    )
