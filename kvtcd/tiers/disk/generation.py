"""One open generation: an LMDB environment with flags under which a crash loses, at most, the last commit.

Three databases: `meta` and `blob` (see `records`) and `namespaces` (name -> identity). Nothing here looks
after threads: `environment` sees to it that one thread writes and that nobody is inside when it is closed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from operator import lt
from pathlib import Path
from typing import TypeAlias

import lmdb
import numpy as np

from kvtcd.core.errors import BadField, Corrupt, Truncated
from kvtcd.tiers.disk.faults import ENGINE, Damaged, data_bytes, require_hardened, translated
from kvtcd.tiers.disk.records import (
    KEY_BYTES,
    Bytes,
    Page,
    Put,
    Stored,
    Take,
    chunk_key,
    chunk_lengths,
    footprint,
    fresh,
    lengths,
    pack_header,
    unpack_header,
)

_MIN_MAP = 256 << 20
_READERS = 256
_LOCK, _LOCK_BYTES = "lock.mdb", (_READERS + 64) * 64
"""The table of readers, a cache line for each."""
_HEADERS_PER_SCAN = 1000
_BATCH_BYTES = 32 << 20
_Transaction: TypeAlias = "lmdb.Transaction[memoryview]"
_Cursor: TypeAlias = "lmdb.Cursor[memoryview]"
_log = logging.getLogger(__name__)


class Generation:
    """An open LMDB environment.

    Args:
        path: an existing directory.
        quota: bytes it is meant to hold. The map has twice as much, so that freed pages that LMDB cannot use
            yet do not fill it, and is never resized: that would pull pages from under readers.
        create: make the databases. reading: change nothing, while nobody else has it open.

    Raises:
        Unavailable: an LMDB without the checks that make damaged files raise rather than crash.
        Damaged: not a sound LMDB file with our databases.
        StoreFailed: it cannot be opened.
    """

    def __init__(self, path: Path, *, quota: int, create: bool = False, reading: bool = False) -> None:
        require_hardened()
        self.path = path
        with ExitStack() as undo, translated("open", path):
            if not reading:
                _allocate(path / _LOCK, _LOCK_BYTES)
            self._lmdb = lmdb.open(
                str(path),
                map_size=max(2 * quota, 2 * data_bytes(path), _MIN_MAP),
                create=False,
                readonly=reading,
                lock=not reading,
                mode=0o600,
                metasync=False,
                max_readers=_READERS,
                max_dbs=3,
                lib_version=ENGINE,
            )
            undo.callback(self._lmdb.close)
            self._meta = self._lmdb.open_db(b"meta", create=create)
            self._blob = self._lmdb.open_db(b"blob", create=create)
            self._names = self._lmdb.open_db(b"namespaces", create=create)
            self._lmdb.reader_check()
            self.used = self._probe()
            undo.pop_all()

    @property
    def file_bytes(self) -> int:
        """Length of the data file, 0 when it has just been superseded."""
        return data_bytes(self.path)

    def write(self, puts: Sequence[Put], drops: Sequence[bytes]) -> None:
        """Remove `drops` and then store `puts` in one transaction."""
        need = sum(put.footprint for put in puts)
        with translated("write", self.path, need=need):
            with self._lmdb.begin(write=True, buffers=True) as transaction:
                freed = sum(self._delete(transaction, key) for key in drops)
                for put in puts:
                    freed += self._delete(transaction, put.key)
                    transaction.put(put.key, pack_header(put), db=self._meta)
                    for key, chunk in put.chunks():
                        transaction.put(key, chunk, db=self._blob)
            self.used += need - freed

    def read(self, key: bytes, take: Take) -> tuple[bytes, Bytes] | None:
        """Return (envelope, blob) of a record as copies, the blob in memory that `take` gives, or None."""
        with translated("read", self.path), self._lmdb.begin(buffers=True) as transaction:
            header = transaction.get(key, db=self._meta)
            if header is None:
                return None
            stored = unpack_header(key, header)
            # All chunks are there before memory is taken for the length that the header claims.
            chunks = self._chunks(transaction, key, stored)
            blob = take(stored.blob_bytes)
            begin = 0
            for chunk in chunks:
                # numpy's copy lets other threads run; that of `bytes` or a slice stops them all.
                np.copyto(blob[begin : begin + len(chunk)], np.frombuffer(chunk, np.uint8))
                begin += len(chunk)
            return stored.envelope, blob

    def envelope(self, key: bytes) -> bytes | None:
        """Return the envelope of a record as a copy, or None."""
        with translated("read", self.path), self._lmdb.begin(buffers=True) as transaction:
            header = transaction.get(key, db=self._meta)
            return None if header is None else unpack_header(key, header).envelope

    def page(self, after: bytes) -> tuple[Page, bytes | None]:
        """Return records in key order, and the key to go on after, or None at the end.

        Looks at 1,000 headers in one short transaction: a long one would keep freed pages from being used.
        Headers that cannot be read are left out.
        """
        with translated("scan", self.path), self._lmdb.begin() as transaction:
            cursor = transaction.cursor(self._meta)
            there = cursor.set_range(after + b"\0")
            rows = list(islice(cursor.iternext(), _HEADERS_PER_SCAN)) if there else []
            keys = [after, *(key for key, _ in rows)]
            if not all(map(lt, keys, keys[1:])):  # would go round for ever in a damaged tree
                raise Damaged("scan", "keys are out of order")
            return Page.of(rows), keys[-1] if len(rows) == _HEADERS_PER_SCAN else None

    def batches(self, keep: Callable[[bytes], bool]) -> Iterator[list[Put]]:
        """Yield the records whose envelope `keep` accepts, 32 MiB at a time; damaged ones are left out."""
        batch: list[Put] = []
        nbytes = 0
        for page in walk(self.page):
            for key, envelope in zip(page.keys, page.envelopes, strict=True):
                if not keep(envelope):
                    continue
                with suppress(Corrupt):
                    if found := self.read(key, fresh):
                        batch.append(Put(key, *found))
                        nbytes += batch[-1].footprint
                if nbytes >= _BATCH_BYTES:
                    yield batch
                    batch, nbytes = [], 0
        yield batch

    def drop_orphans(self) -> int:
        """Remove chunks without a header and headers that cannot be read; return of how many records."""
        with translated("drop orphans", self.path):
            with self._lmdb.begin(write=True, buffers=True) as transaction:
                orphans = self._orphans(transaction)
                for key in orphans:
                    self._delete(transaction, key)
            return len(orphans)

    def namespaces(self) -> dict[str, bytes]:
        """Return the identity of every namespace by its name."""
        with translated("read namespaces", self.path), self._lmdb.begin(buffers=True) as transaction:
            cursor = transaction.cursor(self._names)
            return {name.decode(): bytes(cursor.value()) for name in _keys(cursor)}

    def put_namespaces(self, namespaces: Mapping[str, bytes]) -> None:
        """Add or replace identities."""
        with translated("write namespaces", self.path), self._lmdb.begin(write=True) as transaction:
            for name, identity in namespaces.items():
                transaction.put(name.encode(), identity, db=self._names)

    def sync(self) -> None:
        """Make the last commit durable too: a commit by itself leaves its meta page to the next one."""
        with translated("sync", self.path):
            self._lmdb.sync(True)  # noqa: FBT003 - the C function takes it by position

    def check_readers(self) -> int:
        """Free the slots of readers whose process is gone; return how many."""
        with translated("check readers", self.path):
            return self._lmdb.reader_check()

    def close(self) -> None:
        """Unmap the file; nobody may be inside."""
        self._lmdb.close()

    def _delete(self, transaction: _Transaction, key: bytes) -> int:
        """Remove header and chunks of a record; return the bytes it occupied."""
        header = transaction.get(key, db=self._meta)
        freed = 0 if header is None else _footprint(key, header)
        transaction.delete(key, db=self._meta)
        cursor = transaction.cursor(self._blob)
        while cursor.set_range(key) and cursor.key()[:KEY_BYTES] == key:
            transaction.delete(bytes(cursor.key()), db=self._blob)
        return freed

    def _chunks(self, transaction: _Transaction, key: bytes, stored: Stored) -> list[memoryview]:
        """Return views of the chunks of a record, valid within the transaction."""
        chunks: list[memoryview] = []
        for index, length in enumerate(chunk_lengths(stored.blob_bytes)):
            chunk = transaction.get(chunk_key(key, index), db=self._blob)
            if chunk is None:
                raise Truncated("record", f"chunk {index} of a blob of {stored.blob_bytes} bytes is missing")
            if len(chunk) != length:
                raise BadField("record", f"chunk {index} has {len(chunk)} bytes, not {length}")
            chunks.append(chunk)
        if transaction.get(chunk_key(key, len(chunks)), db=self._blob) is not None:
            raise BadField("record", f"more chunks than a blob of {stored.blob_bytes} bytes has")
        return chunks

    def _orphans(self, transaction: _Transaction) -> set[bytes]:
        """Return the keys of records without a header that can be read."""
        keys = {
            key[:KEY_BYTES]
            for database in (self._meta, self._blob)
            for key in _keys(transaction.cursor(database))
        }
        headers = ((key, transaction.get(key, db=self._meta)) for key in keys)
        return {key for key, header in headers if header is None or _footprint(key, header) == 0}

    def _probe(self) -> int:
        """Read every header, every namespace and one chunk; return the bytes that the records occupy."""
        self.namespaces()
        with self._lmdb.begin(buffers=True) as transaction:
            chunks = transaction.cursor(self._blob)
            if next(_keys(chunks), None):
                bytes(chunks.value())
        used = unreadable = 0
        for page in walk(self.page):
            used += int(page.footprints.sum())
            unreadable += page.unreadable
        if unreadable:
            _log.warning(
                "%s: %d headers of records cannot be read; those records are missing", self.path, unreadable
            )
        return used


def _keys(cursor: _Cursor, after: bytes = b"") -> Iterator[bytes]:
    """Step through the keys of a database, leaving the cursor at each."""
    there = cursor.set_range(after + b"\0")
    while there:
        key = bytes(cursor.key())
        if key <= after:  # would go round for ever in a damaged tree
            raise Damaged("scan", "keys are out of order")
        after = key
        yield key
        there = cursor.next()


def walk(page: Callable[[bytes], tuple[Page, bytes | None]]) -> Iterator[Page]:
    """Iterate over all records, a page of them at a time, as `Generation.page` returns them."""
    after: bytes | None = b""
    while after is not None:
        found, after = page(after)
        yield found


def _footprint(key: bytes, header: memoryview) -> int:
    """Return the bytes a record occupies, 0 for one that cannot be read."""
    try:
        return footprint(*lengths(key, header))
    except Corrupt:
        return 0


def _allocate(path: Path, nbytes: int) -> None:
    """Give a file its blocks on the device before LMDB maps it: SIGBUS ends who touches a page without one.

    Raises:
        OSError: the device has no room for them.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)
