"""A certificate authority of our own, for tests of TLS."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@dataclass(frozen=True)
class Authority:
    """An authority whose certificate and those that it signs lie in a folder."""

    folder: Path

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        return ec.generate_private_key(ec.SECP256R1())

    @cached_property
    def root(self) -> Path:
        """Its own certificate, for clients to trust."""
        whole = self._signed("test authority", self._key.public_key(), days=365, names=(), ca=True)
        path = self.folder / "ca.pem"
        path.write_bytes(whole)
        return path

    def issue(self, *names: str, days: float = 90, stem: str = "server") -> tuple[Path, Path]:
        """Sign a certificate for names and addresses; return its file and that of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, secret = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        certificate.write_bytes(self._signed(stem, key.public_key(), days=days, names=names))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        secret.chmod(0o600)
        return certificate, secret

    def _signed(self, subject, public, *, days, names, ca=False) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(subject))
            .issuer_name(_named("test authority"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(map(_alternative, names)), critical=False
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
