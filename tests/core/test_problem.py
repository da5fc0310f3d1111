"""Every error that a client may see comes out of its problem as it went in."""

from __future__ import annotations

import json

import pytest

from kvtcd.core import device_errors, errors
from kvtcd.core.errors import KvtcdError, ServerError
from kvtcd.core.problem import KINDS, error_from, http_problem, kind_of, problem

SEEN_BY_CLIENTS = [
    errors.BadRequest("tokens", "is missing"),
    errors.BadKey("XY"),
    errors.BadIdentity("weights", "is not 64 lower-case hex digits"),
    errors.UnsupportedRope("dynamic", ("default",)),
    errors.Corrupt("frames", "odd"),
    errors.UnknownNamespace("demo"),
    errors.NotFound(),
    errors.IdentityConflict("demo", differs=("weights", "rope")),
    errors.IdentityConflict("demo", registered_as="other"),
    errors.TooLarge("block", 11, 10),
    errors.BlockMismatch("length", "8 bytes", 7),
    errors.ConfigError("a.toml", "codec.name", "is not known"),
    errors.StoreFailed("commit", "EIO"),
    errors.StoreFull("commit", "ENOSPC"),
    errors.Busy("the transfer budget", 2.5),
    errors.Stopping(),
    errors.DeadlineExceeded("the request", 1.5),
    device_errors.DeviceUnshared("it cannot"),
    device_errors.DeviceRegionsOff(),
    device_errors.NoDriver("it finds no device"),
    device_errors.UnknownDevice("aa" * 16, ("bb" * 16,)),
    device_errors.NotExportable(4096),
    device_errors.BadHandle("event", "cuIpcOpenEventHandle: CUDA_ERROR_INVALID_HANDLE (400)"),
    device_errors.DeviceFailed("aa" * 16, "CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
    device_errors.SameProcess(),
]
INTERNAL = {
    errors.ProfileMismatch, errors.UnknownProfile, errors.UnsupportedCache, errors.UnsupportedModel,
    errors.AlreadyRunning, errors.DeviceLost, errors.Drifted, errors.RemoteFailed, errors.RemoteLate,
    errors.RemoteLeftAlone, errors.Unavailable, errors.ServerError,
}  # fmt: skip


def sent(error: KvtcdError) -> KvtcdError:
    kind = kind_of(error)
    assert kind is not None
    return error_from(kind.status, json.loads(json.dumps(problem(kind, error))))


@pytest.mark.parametrize("error", SEEN_BY_CLIENTS, ids=lambda error: type(error).__name__)
def test_an_error_crosses_the_wire_whole(error):
    received = sent(error)

    assert type(received) is type(error)
    assert str(received) == str(error)
    assert vars(received) == vars(error)


@pytest.mark.parametrize("error", [errors.BadMagic("f", "w"), errors.WrongRecord("f", "w")])
def test_kinds_of_corruption_arrive_as_corrupt(error):
    assert type(sent(error)) is errors.Corrupt


def subclasses(cls: type) -> set[type]:
    return {cls} | {sub for child in cls.__subclasses__() for sub in subclasses(child)}


def test_each_error_is_either_for_clients_or_named_here_as_internal():
    shown = {cls for kind in KINDS for cls in subclasses(kind.error)}

    assert not shown & INTERNAL
    assert subclasses(KvtcdError) - {KvtcdError} == shown | INTERNAL


def test_every_kind_has_an_example_here_and_a_type_of_its_own():
    assert {type(error) for error in SEEN_BY_CLIENTS} == {kind.error for kind in KINDS}
    assert len({kind.type for kind in KINDS}) == len(KINDS)


def test_an_unknown_problem_becomes_a_server_error():
    assert vars(
        error_from(418, {"type": "urn:kvtcd:error:teapot", "title": "Teapot", "detail": "short"})
    ) == {
        "status": 418,
        "title": "Teapot",
        "detail": "short",
    }
    assert isinstance(error_from(411, http_problem(411, "Length Required", "send it")), ServerError)
    assert isinstance(error_from(500, {}), ServerError)
    assert isinstance(error_from(404, {"type": "urn:kvtcd:error:not-found"}), ServerError)
