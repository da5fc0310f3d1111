"""What config.toml says of a store that several daemons share, and the file with what it is entered by."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from kvtcd.config.values import Size, Table, at_least, parsed, read, seconds, usable, validated
from kvtcd.core.errors import ConfigError

_MIB = 1 << 20
_REDIS = re.compile(r"(rediss?)(\+cluster)?://([^/?#@]+)(?:/([0-9]{1,4}))?")
_S3 = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([^?#]*[^/?#]))?/?")
_HOST = re.compile(r"(\[[0-9a-f:]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORT = 6379
CREDENTIAL = "kvtcd.remote"
"""Name of the credential that may hold the secrets instead of the file."""


@dataclass(frozen=True, slots=True)
class RedisAt:
    """A server, or some nodes of a cluster."""

    hosts: tuple[tuple[str, int], ...]
    cluster: bool
    tls: bool
    database: int


@dataclass(frozen=True, slots=True)
class BucketAt:
    """A bucket, or what has a prefix in it."""

    bucket: str
    prefix: str


def _where(url: str) -> RedisAt | BucketAt:
    """Read where a store is.

    Raises:
        ValueError: it does not say so.
    """
    if found := _S3.fullmatch(url):
        return BucketAt(found[1], found[2] or "")
    found, hosts = _REDIS.fullmatch(url), []
    for host in found[3].split(",") if found else ():
        named = _HOST.fullmatch(host)
        if named is None or not 0 < int(named[2] or _PORT) < 65536:
            raise ValueError(_NO_URL)
        hosts.append((named[1].strip("[]"), int(named[2] or _PORT)))
    if found is None or (found[2] and found[4]) or (len(hosts) > 1 and not found[2]):
        raise ValueError(_NO_URL)
    return RedisAt(tuple(hosts), found[2] is not None, found[1] == "rediss", int(found[4] or 0))


_NO_URL = (
    'is none of "redis://host:6379/0", "rediss://…" (TLS), "redis+cluster://one:6379,two:6379", '
    '"s3://bucket/prefix"; users and passwords go into the file remote.credentials'
)  # it may hold a password, so it is not shown


def _url(url: str) -> str:
    if url:
        _where(url)
    return url


def _endpoint(url: str) -> str:
    if url and not re.fullmatch(r"https?://[^/?#@]+", url):
        raise ValueError('is not "https://minio.internal:9000", say')
    return url


def _file(text: str) -> str:
    return text and str(usable(Path(text)))


def _time(text: str) -> str:
    if text:
        seconds(text)
    return text


class Remote(Table):
    """A store that several daemons share: Redis or Valkey, or one with the S3 protocol."""

    url: Annotated[str, AfterValidator(_url)] = ""
    """Where it is; empty: there is none."""
    credentials: Annotated[str, AfterValidator(_file)] = ""
    """TOML file with what it is entered by; empty: nothing is needed, or the credential has it."""
    authority: Annotated[str, AfterValidator(_file)] = ""
    """PEM file of who signs the certificate of a Redis; empty: those whom the system trusts."""
    endpoint: Annotated[str, AfterValidator(_endpoint)] = ""
    """URL of an S3 service; empty: that of AWS."""
    region: str = "us-east-1"
    encrypt: bool = False
    ttl: Annotated[str, AfterValidator(_time)] = "7d"
    """How long Redis keeps a block; empty: as long as it likes."""
    profile: Annotated[Size, at_least(_MIB)] = 4096 * _MIB
    """Of a profile that is fetched, at most."""
    queue: Annotated[Size, at_least(_MIB)] = 256 * _MIB
    timeout: Annotated[float, Field(gt=0, le=60)] = 2.0
    look: Annotated[float, Field(ge=0, le=10)] = 0.05
    believe_present: Annotated[float, Field(ge=0, le=86400)] = 300.0
    believe_absent: Annotated[float, Field(ge=0, le=86400)] = 10.0

    @property
    def where(self) -> RedisAt | BucketAt | None:
        """Return where it is, None without one."""
        return _where(self.url) if self.url else None

    @property
    def ttl_s(self) -> int | None:
        """Return the seconds that Redis keeps a block, None for as long as it likes."""
        return seconds(self.ttl) if self.ttl else None


def _hidden(value: object) -> object:
    """Refuse what is no text without showing it."""
    if not isinstance(value, str):
        raise ValueError("must be text in quotes")  # noqa: TRY004 - what pydantic takes for a wrong value
    return value


Secret = Annotated[str, BeforeValidator(_hidden), Field(repr=False)]


class Credentials(Table):
    """What a store is entered by. It has no repr, so no log has it."""

    username: Secret = ""
    password: Secret = ""
    key_id: Secret = ""
    secret: Secret = ""
    session: Secret = ""


def load_credentials(path: str, given: bytes | None = None) -> Credentials:
    """Read what a store is entered by.

    Args:
        path: of the file; empty: there is none.
        given: its content, if that was handed over instead.

    Raises:
        ConfigError: it cannot be read, a field is wrong, or others may read the file.
    """
    if given is not None:
        return validated(Credentials, parsed(given, f"credential {CREDENTIAL}"), f"credential {CREDENTIAL}")
    if not path:
        return Credentials()
    body = read(Path(path))
    if mode := stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
        raise ConfigError(path, "", f"is open to others (mode …{mode:02o}); chmod 600 it")
    return validated(Credentials, body, path)
