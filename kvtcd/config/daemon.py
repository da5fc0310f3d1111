"""config.toml as frozen values."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr
from pydantic.fields import FieldInfo

from kvtcd.config.remote import BucketAt, RedisAt, Remote
from kvtcd.config.values import (
    FilePath,
    Part,
    Size,
    Table,
    at_least,
    like,
    read,
    show_bytes,
    size,
    usable,
    validated,
)
from kvtcd.core.devices import DEVICE
from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import Share

_MIB = 1 << 20
MAX_SOCKET_PATH = 107
"""Linux has 108 bytes for it, with the zero at the end."""


def _address(text: str) -> str:
    """Let through what can be bound."""
    if text:
        host, _, port = text.rpartition(":")
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            port = ""
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ValueError(f'{text!r} is no address and port; write for instance "127.0.0.1:7337"')
    return text


def _auto_or_size(value: object) -> object:
    """Read a size, or the word ``auto``."""
    if value == "auto":
        return value
    try:
        return size(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "auto"') from None


def _file(text: str) -> str:
    """Read a path that may be left out."""
    return text and str(usable(Path(text)))


_ENDPOINT = partial(
    like, "|tcp://.+:[0-9]{1,5}|ipc:///.+", '"tcp://127.0.0.1:5557", say, or "ipc:///run/kvtcd/events"'
)
_COLLECTOR = partial(like, "|https?://[^/?#]+(/[^?#]*)?", '"http://127.0.0.1:4318", say')
_DEVICE = partial(like, f"auto|{DEVICE.regex}", f'"auto", {DEVICE.shown}')


class Daemon(Table):
    """Where the daemon lives and how long it takes to stop."""

    state: FilePath = Path("/var/lib/kvtcd")
    socket: FilePath = Path("/run/kvtcd/kvtcd.sock")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    stop_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0


class Tcp(Table):
    """TCP, for clients that cannot use the Unix socket; each needs a token, and from other hosts TLS."""

    listen: Annotated[str, AfterValidator(_address)] = ""
    """Address and port; empty: no TCP."""
    tokens: FilePath = Path("/etc/kvtcd/tokens.toml")
    certificate: Annotated[str, AfterValidator(_file)] = ""
    """PEM file; empty: nothing is encrypted, and the address must be of this host alone."""
    key: Annotated[str, AfterValidator(_file)] = ""

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """Return certificate and key, None without TLS."""
        return (Path(self.certificate), Path(self.key)) if self.certificate else None

    @property
    def address(self) -> tuple[str, int] | None:
        """Return host and port, None without TCP."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if port else None


class Host(Table):
    """The host tier: one slab of memory, allocated at start."""

    capacity: Annotated[Size, at_least(_MIB)] = 4 << 30


class Gpu(Table):
    """The GPU tier: raw blocks on CUDA devices, on top of those on the host."""

    capacity: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_size)] = 0
    """Of each device that holds blocks: `device`, and those that policies name at the start. ``auto``: a
    fiftieth of the device, and nothing without one. An engine has its own cache there."""
    device: Annotated[int, Field(ge=0, lt=1000)] = 0
    """Of blocks whose policy names no other."""
    regions: bool = False
    """Whether memory that engines have on a GPU is opened, so that blocks go to and from it directly."""


class Disk(Table):
    """The disk tier; a capacity of 0 switches it off."""

    capacity: Size = 64 << 30
    encrypt: bool = False
    """Packed blocks are encrypted, wherever they lie, under keys that follow from the master key."""


class Tenants(Table):
    """What one tenant may have of each tier: a share, or a size. Policies say the same of namespaces."""

    host: Part = 1.0
    disk: Part = 1.0

    def share(self) -> Share:
        """Return it as the catalog takes it."""
        return Share(self.host, self.disk)


class Codec(Table):
    """Where profiles lie, and what packs and unpacks."""

    profiles: FilePath = Path("/var/lib/kvtcd/profiles")
    device: Annotated[str, AfterValidator(_DEVICE)] = "cpu"
    """Where the products run, unless a policy says ``cpu``, ``cuda`` or ``cuda:N``. ``cuda``: on the device
    of `Gpu`, ``cuda:N``: on that one; ``auto``: ``cuda`` where there is one. Blobs are the same."""
    memory: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_size)] = "auto"
    """Of each such device, for bases of profiles and scratch of nvCOMP; ``auto``: a twentieth."""
    threads: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads of one matrix product on the CPU; 0: half of the cores."""


class Events(Table):
    """KV events for routers, on ZeroMQ and in vLLM's form."""

    zmq: Annotated[str, AfterValidator(_ENDPOINT)] = ""
    """Where subscribers connect to; empty: nothing is published."""
    replay: Annotated[str, AfterValidator(_ENDPOINT)] = ""
    """Where they ask for batches that they have missed; empty: nowhere."""
    topic: str = ""
    tenant: str = ""
    """Whose blocks are told of: whoever can connect reads it."""
    hashes: Literal["int64", "bytes"] = "int64"


class Tracing(Table):
    """Spans of requests, moves and stages, for OpenTelemetry."""

    endpoint: Annotated[str, AfterValidator(_COLLECTOR)] = ""
    """Where a collector takes them by OTLP over HTTP; empty: nothing is traced."""
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of requests that do not say themselves whether they are to be traced."""


class Limits(Table):
    """Bounds on what clients may do at once."""

    connections: Annotated[int, Field(ge=1)] = 512
    in_flight: Annotated[Size, at_least(_MIB)] = 1 << 30
    """Bytes of host memory that requests hold, on their way in or out."""
    tenant_in_flight: Annotated[Size, at_least(_MIB)] = 512 << 20
    regions: Annotated[int, Field(ge=0)] = 64
    """Memory that one tenant shares at once, of the host and of GPUs: so many pieces."""
    region_bytes: Size = 4 << 30
    """Bytes of those of the host together."""
    device_region_bytes: Size = 256 << 30


class Config(Table):
    """The whole of config.toml. Relative paths are taken from the file's folder."""

    _source: str = PrivateAttr("the defaults (no --config)")

    daemon: Daemon = Daemon()
    tcp: Tcp = Tcp()
    gpu: Gpu = Gpu()
    host: Host = Host()
    disk: Disk = Disk()
    remote: Remote = Remote()
    tenants: Tenants = Tenants()
    codec: Codec = Codec()
    events: Events = Events()
    tracing: Tracing = Tracing()
    limits: Limits = Limits()
    policies: tuple[FilePath, ...] = Field(default=(), strict=False)

    def fault(self, field: str, why: str) -> ConfigError:
        """Return the error that a value is one that this machine does not give; it names the file."""
        return ConfigError(self._source, field, why)


def load(path: Path | None) -> Config:
    """Read config.toml; None gives the defaults.

    Raises:
        ConfigError: it cannot be read, or a field is unknown, of the wrong type or out of range.
    """
    config = Config() if path is None else validated(Config, read(path), path)
    if path:
        config._source = str(path)  # noqa: SLF001 - no file may say it, so it is no field
    if bool(config.events.zmq) != bool(config.events.tenant):
        raise config.fault("events.tenant", "belongs to events.zmq: say whose blocks are told of, and where")
    if config.events.replay and not config.events.zmq:
        raise config.fault("events.replay", "repeats what events.zmq has told, and that is empty")
    if bool(config.tcp.certificate) != bool(config.tcp.key):
        raise config.fault("tcp.key", "certificate and key belong together: name both, or neither")
    address = config.tcp.address
    if address and not config.tcp.tls and not ipaddress.ip_address(address[0]).is_loopback:
        why = (
            f"{config.tcp.listen!r} is for other hosts too, and nothing is encrypted; write "
            '"127.0.0.1:7337" or "[::1]:7337", or name tcp.certificate and tcp.key'
        )
        raise config.fault("tcp.listen", why)
    if config.remote.authority and not isinstance(config.remote.where, RedisAt):
        why = "is for Redis; S3 trusts whom the system trusts (SSL_CERT_FILE names others)"
        raise config.fault("remote.authority", why)
    if config.remote.endpoint and not isinstance(config.remote.where, BucketAt):
        raise config.fault("remote.endpoint", 'belongs to a url such as "s3://bucket/prefix"')
    root = path.absolute().parent if path else Path.cwd()

    def absolute(target: Path) -> Path:
        return root / target

    if (length := len(os.fsencode(absolute(config.daemon.socket)))) > MAX_SOCKET_PATH:
        why = f"{length} bytes in all; the path of a Unix socket has at most {MAX_SOCKET_PATH}"
        raise config.fault("daemon.socket", why)
    return config.model_copy(
        update={
            "daemon": config.daemon.model_copy(
                update={"state": absolute(config.daemon.state), "socket": absolute(config.daemon.socket)}
            ),
            "tcp": config.tcp.model_copy(
                update={"tokens": absolute(config.tcp.tokens)}
                | {
                    name: str(absolute(Path(file)))
                    for name in ("certificate", "key")
                    if (file := getattr(config.tcp, name))
                }
            ),
            "remote": config.remote.model_copy(
                update={
                    name: str(absolute(Path(file)))
                    for name in ("credentials", "authority")
                    if (file := getattr(config.remote, name))
                }
            ),
            "codec": config.codec.model_copy(update={"profiles": absolute(config.codec.profiles)}),
            "policies": tuple(absolute(policy) for policy in config.policies),
        }
    )


def dump(config: Config) -> str:
    """Write a configuration as TOML that `load` reads back."""
    lines = [f"policies = [{', '.join(_toml(p) for p in config.policies)}]"]
    for section in Config.model_fields:
        table = getattr(config, section)
        if isinstance(table, Table):
            lines += ["", f"[{section}]"]
            for name, field in type(table).model_fields.items():
                value = getattr(table, name)
                lines.append(f"{name} = {_toml(show_bytes(value) if _is_size(field, value) else value)}")
    return "\n".join(lines) + "\n"


def _is_size(field: FieldInfo, value: object) -> bool:
    """Tell whether an int of this field stands for bytes: those fields read text first."""
    return isinstance(value, int) and any(isinstance(each, BeforeValidator) for each in field.metadata)


def _toml(value: object) -> str:
    if isinstance(value, str | Path):
        # TOML's basic strings are JSON's, but for DEL.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)
