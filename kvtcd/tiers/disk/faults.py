"""Errors of LMDB and the operating system, translated into ours."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from kvtcd.core.errors import StoreFailed, StoreFull, Unavailable

DATA = "data.mdb"
ENGINE = 0
"""py-lmdb bundles LMDB 0.9 and 1.0, whose files differ; an environment variable changes its default."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Pages of the trees that a transaction may add beside the records themselves.
_SLACK = 1 << 20


class Broken(StoreFailed):
    """The engine refuses everything, or what the device holds is unknown, until it is closed and reopened."""


class Damaged(Broken):
    """The file breaks the rules of its format."""


@contextmanager
def translated(op: str, path: Path, *, need: int = 0) -> Iterator[None]:
    """Turn errors of `op` in the generation directory `path` into ours.

    LMDB reports a write cut short by a full device as a plain I/O error, so the free space decides what an
    I/O error means: less than the `need` bytes of the operation is a full device.

    Raises:
        StoreFull: no room in the map or on the device.
        Damaged: the file is not a sound LMDB file.
        Broken: an I/O error, after which LMDB must be reopened.
        StoreFailed: anything else.
    """
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFull(op, "the map is full (MDB_MAP_FULL)", str(path)) from error
    except _DAMAGE as error:
        raise Damaged(op, _name(error), str(error)) from error
    except lmdb.Error as error:
        io_error = error.code == errno.EIO
        if error.code in _NO_ROOM or (io_error and _room(path) < need + _SLACK):
            raise StoreFull(op, "no space left on the device", str(path)) from error
        if io_error or isinstance(error, lmdb.PanicError):
            raise Broken(op, _name(error), str(error)) from error
        raise StoreFailed(op, _name(error), str(error)) from error
    except OSError as error:
        kind = StoreFull if error.errno in _NO_ROOM else StoreFailed
        raise kind(op, errno.errorcode.get(error.errno or 0, "OSError"), str(error)) from error


_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.BadTxnError,
    lmdb.NotFoundError,  # a database that every generation has
)


def _name(error: lmdb.Error) -> str:
    return str(getattr(error, "MDB_NAME", None) or errno.errorcode.get(error.code, error.code))


def _room(path: Path) -> int:
    """Return by how many bytes the data file may still grow."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return free
    return min(free, limit - data_bytes(path))


def data_bytes(path: Path) -> int:
    """Return the length of the data file in a generation directory, 0 when there is none."""
    try:
        return (path / DATA).stat().st_size
    except FileNotFoundError:
        return 0


def require_hardened() -> None:
    """Refuse an LMDB that a damaged file can crash.

    Raises:
        Unavailable: it is one.
    """
    version: tuple[int, ...] = lmdb.version(subpatch=True, lib_version=ENGINE)
    if version[:2] != (0, 9) or len(version) < 4 or version[3] < 1:
        raise Unavailable(
            f"lmdb {lmdb.__version__} runs LMDB {'.'.join(map(str, version))} without the bundled checks for "
            "damaged files; reinstall the wheel with neither LMDB_FORCE_SYSTEM nor LMDB_PURE set"
        )
