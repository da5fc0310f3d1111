"""The tree of errors: one class per cause, data in attributes, a message that says what to do.

::

    KvtcdError
    ├── BadRequest              a request breaks a rule; `field`, `why`
    │   ├── BadKey              not lower-case hex of 1-64 bytes
    │   └── BadIdentity         an identity that cannot be understood
    │       └── UnsupportedRope a RoPE type we cannot undo exactly
    ├── BlockMismatch           the body is not a block of this namespace; `want`, `got`
    ├── UnknownNamespace        no such namespace for this tenant
    ├── IdentityConflict        name and identity are taken, but not together
    ├── NotFound                no such block for this tenant
    ├── Busy                    over a bound for now; `retry_after` seconds
    │   └── Stopping            the daemon takes nothing new, it is about to end
    ├── TooLarge                over a limit that waiting will not move
    ├── DeadlineExceeded        the caller's time ran out; `goes_on`: what was asked for is done all the same
    ├── Corrupt                 bytes at rest or on the wire that break their own rules
    │   ├── BadMagic · BadVersion · Truncated · BadChecksum · BadField
    │   └── WrongRecord         an intact record found under a key that is not its own
    ├── ProfileMismatch         a profile of another model, layout or RoPE
    ├── UnknownProfile          a blob names a profile that is not here
    ├── Drifted                 blocks unlike those their profile was made from, not to be packed; `why`
    ├── UnsupportedCache        an engine cache whose past cannot be stored by prefix
    ├── UnsupportedModel        a model that cannot be calibrated
    ├── StoreFailed             the disk tier could not complete an operation; `op`, `code`
    │   └── StoreFull           no room on the device or in the map
    ├── RemoteFailed            the shared store could not be asked; `op`, `why`
    ├── ConfigError             a file with a wrong field; `path`, `field`, `why`
    ├── AlreadyRunning          another process holds the state directory
    ├── DeviceLost              a GPU failed under its process, which has to end; `device`, `why`
    ├── DeviceUnshared          memory of a GPU that cannot be shared; see `device_errors`
    ├── Unavailable             something outside could not be had (a model package, a daemon)
    └── ServerError             the daemon answered with an error the client has no better class for
"""

from __future__ import annotations

from pathlib import Path


class KvtcdError(Exception):
    """Root of every error that kvtcd raises on purpose."""

    @property
    def told(self) -> str:
        """What a client is told; `str` of it is for the log, and may name files of this host."""
        return str(self)


class BadRequest(KvtcdError):
    """A request breaks a rule."""

    def __init__(self, field: str, why: str) -> None:
        self.field, self.why = field, why
        super().__init__(f"{field}: {why}")


class BadKey(BadRequest):
    """A key that is not lower-case hex of 1 to 64 bytes."""

    def __init__(self, text: str) -> None:
        shown = text if len(text) <= 40 else f"{text[:40]}… ({len(text)} characters)"
        super().__init__("key", f"{shown!r} is not 2 to 128 lower-case hex digits, an even number of them")


class BadIdentity(BadRequest):
    """A namespace identity that cannot be understood."""


class UnsupportedRope(BadIdentity):
    """A RoPE type that cannot be undone exactly."""

    def __init__(self, kind: str, supported: tuple[str, ...]) -> None:
        self.kind = kind
        super().__init__(
            "rope.kind",
            f"{kind!r} cannot be undone exactly; supported are {', '.join(supported)}. "
            "Register the namespace without RoPE to have its blocks stored losslessly",
        )


class BlockMismatch(KvtcdError):
    """The bytes of a block do not fit the layout of its namespace."""

    def __init__(self, what: str, want: object, got: object) -> None:
        self.what, self.want, self.got = what, want, got
        super().__init__(f"{what}: this namespace needs {want}, the request has {got}")


class UnknownNamespace(KvtcdError):
    """No namespace of this name for this tenant; `purging`: it was to be removed."""

    def __init__(self, name: str, *, purging: bool = False) -> None:
        self.name = name
        todo = ": there is nothing to remove" if purging else f"; PUT /v1/namespaces/{name} first"
        super().__init__(f"namespace {name!r} is not registered{todo}")


class IdentityConflict(KvtcdError):
    """The tenant uses this name for another identity, or this identity under another name."""

    def __init__(self, name: str, *, differs: tuple[str, ...] = (), registered_as: str | None = None) -> None:
        self.name, self.differs, self.registered_as = name, differs, registered_as
        super().__init__(
            f"this identity is already registered as namespace {registered_as!r}; use that name"
            if registered_as
            else f"namespace {name!r} is registered with another identity (differs in {', '.join(differs)}); "
            "choose another name, or DELETE it first"
        )


class NotFound(KvtcdError):
    """No block under this key for this tenant."""

    def __init__(self, what: str = "block") -> None:
        self.what = what
        super().__init__(f"no such {what}")


class Busy(KvtcdError):
    """A bound is reached for now, or `why` something else cannot be done just now."""

    def __init__(self, what: str, retry_after: float = 1.0, *, why: str = "is at its bound") -> None:
        self.what, self.retry_after = what, retry_after
        super().__init__(f"{what} {why}; try again in {retry_after:g} s")


class Stopping(Busy):
    """The daemon is about to end; its successor may be there soon."""

    def __init__(self, retry_after: float = 5.0) -> None:
        self.what, self.retry_after = "daemon", retry_after
        KvtcdError.__init__(self, f"the daemon is stopping; try again in {retry_after:g} s")


class TooLarge(KvtcdError):
    """A size over a limit that waiting does not move."""

    def __init__(self, what: str, nbytes: int, limit: int) -> None:
        self.what, self.nbytes, self.limit = what, nbytes, limit
        super().__init__(f"{what} has {nbytes} bytes; the limit is {limit}")


class DeadlineExceeded(KvtcdError):
    """The time the caller gave is over. If it `goes_on`, what was asked for is done all the same."""

    def __init__(self, what: str, seconds: float, *, goes_on: bool = False) -> None:
        self.what, self.seconds, self.goes_on = what, seconds, goes_on
        super().__init__(f"{what} did not end within {seconds:g} s" + ("; it goes on" if goes_on else ""))


class Corrupt(KvtcdError):
    """Bytes that break the rules of their own format."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why
        super().__init__(f"{what}: {why}")


class BadMagic(Corrupt):
    """The first bytes are not those of the format."""


class BadVersion(Corrupt):
    """A version this release does not read."""


class Truncated(Corrupt):
    """Fewer bytes than the header promises."""


class BadChecksum(Corrupt):
    """A checksum or MAC that does not match its bytes."""


class BadField(Corrupt):
    """A field out of its range, or fields that contradict each other."""


class WrongRecord(Corrupt):
    """An intact record found under a key that is not its own."""


class ProfileMismatch(KvtcdError):
    """A profile made for another model, layout or RoPE."""

    def __init__(self, what: str, want: object, got: object) -> None:
        self.what, self.want, self.got = what, want, got
        super().__init__(
            f"the profile does not fit: its {what} is {got}, not {want}; is it of another model?"
        )


class UnknownProfile(KvtcdError):
    """A blob names a profile that is not in the profiles folder."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        super().__init__(f"profile {digest.hex()} is not in the profiles folder; copy it there")


class Drifted(KvtcdError):
    """Blocks are unlike what their profile was made from, and their policy does not have such packed."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f'unlike calibration ({why}), and the policy says quality.on_drift = "refuse"')


class UnsupportedCache(KvtcdError):
    """An engine cache whose past cannot be stored by prefix."""


class UnsupportedModel(KvtcdError):
    """A model that the lab cannot calibrate or measure."""


class StoreFailed(KvtcdError):
    """The disk tier could not complete an operation; nothing was half done.

    `where` is for the log alone: the words of the system, which name files.
    """

    where = ""

    def __init__(self, op: str, code: str, where: str = "") -> None:
        self.op, self.code = op, code
        if where:
            self.where = where
        super().__init__(": ".join(filter(None, (f"disk {op} failed", code, where))))

    @property
    def told(self) -> str:
        """What a client is told: no file."""
        return f"disk {self.op} failed: {self.code}"


class StoreFull(StoreFailed):
    """No room left on the device or in the map."""


class RemoteFailed(KvtcdError):
    """The shared store could not be asked, or not in time."""

    def __init__(self, op: str, why: str) -> None:
        self.op, self.why = op, why
        super().__init__(f"remote {op} failed: {why}")


class RemoteLate(RemoteFailed):
    """What was asked of the shared store together did not come in time."""


class RemoteLeftAlone(RemoteFailed):
    """The shared store was not asked: it failed several times in a row a moment ago."""

    def __init__(self, op: str, seconds: float) -> None:
        super().__init__(op, f"it is left alone for another {seconds:.1f} s")


class ConfigError(KvtcdError):
    """A configuration or policy file with a wrong field."""

    def __init__(self, path: Path | str, field: str, why: str) -> None:
        self.path, self.field, self.why = str(path), field, why
        super().__init__(f"{path}: {field}: {why}" if field else f"{path}: {why}")


class AlreadyRunning(KvtcdError):
    """Another process holds the state directory, or what is served at."""

    def __init__(self, path: Path | str, other: str = "state directory") -> None:
        self.path = str(path)
        super().__init__(f"another kvtcd holds {path}; stop it, or choose another {other}")


class DeviceLost(KvtcdError):
    """A GPU failed in a way that no call of this process to it succeeds any more."""

    def __init__(self, device: str, why: str) -> None:
        self.device, self.why = device, why
        super().__init__(f"{device} is lost to this process, start it again: {why}")


class Unavailable(KvtcdError):
    """Something outside this program could not be had."""


class ServerError(KvtcdError):
    """The daemon answered with an error that has no class of its own."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        self.status, self.title, self.detail = status, title, detail
        super().__init__(f"{status} {title}: {detail}")
