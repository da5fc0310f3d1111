"""Errors on the wire: RFC 9457 problem details, written by the daemon and turned back by clients.

One table says which errors a client may see, with which HTTP status, and which attributes travel with them.
An error that is not in it is a bug, and nothing of it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvtcd.core import device_errors, errors
from kvtcd.core.errors import KvtcdError, ServerError

MEDIA_TYPE = "application/problem+json"
_TYPE = "urn:kvtcd:error:"
_BLANK = "about:blank"
"""RFC 9457 section 4.2.1: nothing to say beyond the HTTP status."""


class Kind(NamedTuple):
    """How one class of errors, and those derived from it without a row of their own, looks on the wire."""

    error: type[KvtcdError]
    status: int
    title: str
    data: tuple[str, ...]

    @property
    def name(self) -> str:
        """The kind in one word, as metrics have it."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", self.error.__name__).lower()

    @property
    def type(self) -> str:
        """The URI that names the kind."""
        return _TYPE + self.name


KINDS = (
    Kind(errors.BadRequest, 400, "Bad request", ("field", "why")),
    Kind(errors.BadKey, 400, "Bad key", ("field", "why")),
    Kind(errors.BadIdentity, 400, "Bad identity", ("field", "why")),
    Kind(errors.UnsupportedRope, 400, "Unsupported RoPE", ("field", "why", "kind")),
    Kind(errors.Corrupt, 400, "Malformed body", ("what", "why")),
    Kind(errors.UnknownNamespace, 404, "Unknown namespace", ("name",)),
    Kind(errors.NotFound, 404, "Not found", ("what",)),
    Kind(errors.IdentityConflict, 409, "Identity conflict", ("name", "differs", "registered_as")),
    Kind(errors.TooLarge, 413, "Too large", ("what", "nbytes", "limit")),
    Kind(errors.BlockMismatch, 422, "Not a block of this namespace", ("what", "want", "got")),
    Kind(device_errors.DeviceUnshared, 422, "Memory of a GPU cannot be shared", ()),
    Kind(device_errors.DeviceRegionsOff, 422, "No memory of GPUs is opened", ()),
    Kind(device_errors.NoDriver, 422, "No CUDA driver", ("why",)),
    Kind(device_errors.UnknownDevice, 422, "Unknown GPU", ("uuid", "visible")),
    Kind(device_errors.NotExportable, 422, "Memory without a handle", ("nbytes",)),
    Kind(device_errors.BadHandle, 422, "Bad handle", ("what", "why")),
    Kind(device_errors.DeviceFailed, 422, "GPU failed", ("uuid", "why")),
    Kind(device_errors.SameProcess, 422, "A handle of the daemon's own", ()),
    Kind(errors.ConfigError, 422, "Wrong configuration", ("path", "field", "why")),
    Kind(errors.StoreFailed, 500, "Disk tier failed", ("op", "code")),
    Kind(errors.Busy, 503, "Busy", ("what", "retry_after")),
    Kind(errors.Stopping, 503, "Stopping", ("what", "retry_after")),
    Kind(errors.DeadlineExceeded, 504, "Deadline exceeded", ("what", "seconds", "goes_on")),
    Kind(errors.StoreFull, 507, "Disk full", ("op", "code")),
)
_BY_ERROR = {kind.error: kind for kind in KINDS}
_BY_TYPE = {kind.type: kind for kind in KINDS}


def kind_of(error: KvtcdError) -> Kind | None:
    """Return the row of an error, None for one that is not for clients."""
    return kind_of_class(type(error))


def kind_of_class(error: type[KvtcdError]) -> Kind | None:
    """Return the row of a class of errors, None for one that is not for clients."""
    return next((_BY_ERROR[cls] for cls in error.__mro__ if cls in _BY_ERROR), None)


def problem(kind: Kind, error: KvtcdError) -> dict[str, object]:
    """Return the problem details of an error."""
    data = {name: _plain(getattr(error, name)) for name in kind.data}
    return {"type": kind.type, "title": kind.title, "status": kind.status, "detail": error.told, **data}


def http_problem(status: int, title: str, detail: str) -> dict[str, object]:
    """Return the problem details of a fault in HTTP itself."""
    return {"type": _BLANK, "title": title, "status": status, "detail": detail}


def error_from(status: int, body: Mapping[str, Any]) -> KvtcdError:
    """Return the error that a problem describes, `ServerError` if it is of no known kind."""
    kind = _BY_TYPE.get(str(body.get("type")))
    detail = str(body.get("detail", ""))
    if kind is None or not all(name in body for name in kind.data):
        return ServerError(status, str(body.get("title", "error")), detail)
    error = kind.error.__new__(kind.error, detail)  # the constructors write a detail of their own
    for name in kind.data:
        value = body[name]
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


def _plain(value: object) -> object:
    """Return the JSON form of an attribute; what has none is shown as text."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)
