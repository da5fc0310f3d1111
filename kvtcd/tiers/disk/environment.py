"""The disk environment of one tenant: opens what is sound, sets aside what is not, outlives its engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtcd.core.errors import StoreFailed, StoreFull, TooLarge
from kvtcd.tiers import durable
from kvtcd.tiers.disk import directories
from kvtcd.tiers.disk.faults import Broken, Damaged, translated
from kvtcd.tiers.disk.gate import Gate
from kvtcd.tiers.disk.generation import Generation, walk
from kvtcd.tiers.disk.inspection import Condition, read_condition
from kvtcd.tiers.disk.opening import build, close_clean, copied, open_sound
from kvtcd.tiers.disk.records import Bytes, Page, Put, Take, check_key, fresh

MAX_TRANSACTION = 256 << 20
"""Bytes of records in one transaction: LMDB keeps them all in memory until the commit."""
RECOVERY_WINDOW = 600.0
"""Seconds in which a second failure of the engine means that the device cannot be trusted."""
_log = logging.getLogger(__name__)


class Environment:
    """Records and namespaces of one tenant on disk. Blocking; reads from any thread, writes from one.

    A record is there with exactly the bytes that were put, or it is missing, or reading it raises `Corrupt`
    because parts of it are missing; whether its bytes are still right is for their MAC to say.

    Args:
        path: its directory; created unless it exists. The parent must exist.
        quota: bytes that `used` is meant to stay below; the caller evicts.

    Attributes:
        recovered: the last process did not close it; the file has been verified in full.
        quarantined: the file was damaged and is set aside, and this began empty.
        failed: the engine broke twice in ten minutes, or its file is damaged; all calls raise StoreFailed.

    Raises:
        StoreFailed: it cannot be opened, for a reason other than damage.
        Unavailable: the installed lmdb has no checks for damaged files.
    """

    def __init__(self, path: Path, *, quota: int) -> None:
        self.path = path
        self.quota = quota
        self.recovered = False
        self.quarantined = False
        self.failed = False
        self._gate = Gate()
        self._process = os.getpid()
        self._writer: int | None = None
        self._broke_at: float | None = None
        with translated("open", path):
            durable.make_directory(path)
            directories.sweep(path)
            self._generation: Generation | None = self._open_current()

    @property
    def used(self) -> int:
        """Bytes that the records occupy: the sum of their footprints; 0 when closed. Never waits."""
        generation = self._generation
        return generation.used if generation else 0

    @property
    def file_bytes(self) -> int:
        """Length of the data file, 0 when closed. It keeps its length when records go. Never waits."""
        generation = self._generation
        return generation.file_bytes if generation else 0

    def write(self, puts: Sequence[Put], drops: Sequence[bytes]) -> None:
        """Remove records and then store records, all in one transaction: on return, all or (an error) none.

        A put replaces the record under its key; a drop of a missing key is no error. The commit is ordered,
        not final: a power loss may undo the last one, never a part of it. Call `sync` to promise more.

        Raises:
            StoreFull: no room; drop records in a call of their own, then write again.
            StoreFailed: any other failure.
            TooLarge: more than `MAX_TRANSACTION` bytes at once.
        """
        self._claim_writer()
        for key in drops:
            check_key(key)
        nbytes = sum(put.footprint for put in puts)
        if nbytes > MAX_TRANSACTION:
            raise TooLarge("one disk transaction", nbytes, MAX_TRANSACTION)
        with self._using("write") as generation:
            generation.write(puts, drops)

    def read(self, key: bytes, take: Take = fresh) -> tuple[bytes, Bytes] | None:
        """Return (envelope, blob) of a record, both copies, or None when there is none.

        Args:
            key: of the record.
            take: gives the memory for the blob.

        Raises:
            Corrupt: parts of the record are missing or too many; drop it.
            StoreFailed: the read failed.
        """
        check_key(key)
        with self._using("read") as generation:
            return generation.read(key, take)

    def envelope(self, key: bytes) -> bytes | None:
        """Return a copy of the envelope of a record, or None when there is none.

        Raises:
            Corrupt: the header of the record cannot be read.
            StoreFailed: the read failed.
        """
        check_key(key)
        with self._using("read") as generation:
            return generation.envelope(key)

    def scan(self) -> Iterator[Page]:
        """Iterate over all records without their blobs, in key order, in short transactions.

        Writes between two steps of the iteration are allowed, and seen or not.
        """
        return walk(self._page)

    def drop_orphans(self) -> int:
        """Remove chunks without a header and headers that cannot be read; return of how many records.

        Transactions leave none; meant for the start after `recovered`.
        """
        self._claim_writer()
        with self._using("drop orphans") as generation:
            return generation.drop_orphans()

    def namespaces(self) -> dict[str, bytes]:
        """Return the identity of every namespace by its name."""
        with self._using("read namespaces") as generation:
            return generation.namespaces()

    def put_namespace(self, name: str, identity: bytes) -> None:
        """Add or replace the identity of a namespace; durable on return."""
        self._claim_writer()
        with self._using("write namespaces") as generation:
            generation.put_namespaces({name: identity})
            generation.sync()

    def rewrite(self, keep: Callable[[bytes], bool], namespaces: Mapping[str, bytes]) -> bool:
        """Copy the records whose envelope `keep` accepts into a new file and unlink the old one, durably.

        Afterwards no file here holds a byte of any other record or namespace, but for what was set aside as
        damaged. A crash leaves the old or the new file whole. Reads go on meanwhile. Where there is no room
        for a second copy, what finds none is left out; where there is none for an empty file, the old one is
        unlinked before the new one is made, and a crash in between leaves nothing.

        Args:
            keep: given an envelope; must not use this environment.
            namespaces: what the new file knows.

        Returns: whether all that is kept is there.

        Raises:
            StoreFailed: it could not be completed.
        """
        self._claim_writer()
        path, whole = None, False
        with self._using("rewrite") as old, suppress(StoreFull), translated("rewrite", self.path):
            path, whole = copied(old, self.path, self.quota, keep, namespaces)
        with self._gate.exclusive():
            if self._generation is not None:
                self._reopen(path or self._begun_anew(self._generation, namespaces))
        with translated("rewrite", self.path):
            directories.sweep(self.path)
        return whole

    @property
    def set_aside(self) -> tuple[str, ...]:
        """Names of what was damaged, at this opening or an earlier one, the oldest first."""
        with translated("look", self.path):
            return tuple(directories.damaged(self.path))

    def drop_set_aside(self) -> None:
        """Unlink what was set aside as damaged, durably."""
        with translated("drop set aside", self.path):
            directories.sweep(self.path, bad=True)

    def sync(self) -> None:
        """Make the last write final: after this a power loss undoes nothing."""
        with self._using("sync") as generation:
            generation.sync()

    def check_readers(self) -> int:
        """Free what readers of dead processes hold; return how many there were."""
        with self._using("check readers") as generation:
            return generation.check_readers()

    def close(self) -> None:
        """Close in order, so that the next start is quick; waits for reads and the write. May be repeated."""
        if self._process != os.getpid():
            return
        with self._gate.exclusive(), translated("close", self.path):
            generation, self._generation = self._generation, None
            if generation is not None:
                try:
                    close_clean(generation)
                except Broken as broken:
                    raise StoreFailed("close", broken.code, broken.where) from broken

    def _open_current(self) -> Generation:
        """Open the current generation if it is sound, else an empty one."""
        path = directories.current(self.path)
        if path is not None:
            self.recovered = read_condition(path) is not Condition.CLEAN
            try:
                return open_sound(path, self.quota)
            except Damaged as damage:
                self.recovered, self.quarantined = False, True
                directories.set_aside(path)
                _log.warning("%s is damaged and set aside; beginning empty (%s)", path, damage)
        return open_sound(build(self.path, self.quota, lambda _: None), self.quota)

    def _page(self, after: bytes) -> tuple[Page, bytes | None]:
        with self._using("scan") as generation:
            return generation.page(after)

    @contextmanager
    def _using(self, op: str) -> Iterator[Generation]:
        """Hold the open generation; when it breaks, reopen it for those who come after."""
        self._check_process(op)
        broken: Broken | None = None
        with self._gate.shared():
            generation = self._generation
            if generation is None:
                raise StoreFailed(op, "failed before; restart to check it" if self.failed else "closed")
            try:
                yield generation
            except Broken as error:
                broken = error
        if broken is not None:
            self._recover(generation)
            raise StoreFailed(op, broken.code, broken.where) from broken

    def _recover(self, broken: Generation) -> None:
        """Reopen after an I/O error, once: what a failed fsync left on the device is unknown."""
        with self._gate.exclusive():
            if self._generation is not broken:
                return  # another thread has done it
            now = time.monotonic()
            again = self._broke_at is not None and now - self._broke_at < RECOVERY_WINDOW
            self._broke_at = now
            if again:
                broken.close()
                self._fail("the second failure within ten minutes")
            else:
                _log.warning("%s broke; verifying and reopening it", broken.path)
                self._reopen(broken.path)

    def _reopen(self, path: Path) -> None:
        """Go on with the generation at `path`; the gate is held."""
        if self._generation is not None:
            self._generation.close()
        try:
            with translated("reopen", path):
                self._generation = open_sound(path, self.quota)
        except StoreFailed as error:
            self._fail(str(error))

    def _begun_anew(self, old: Generation, namespaces: Mapping[str, bytes]) -> Path:
        """Unlink first, and then build a file without records; the gate is held."""
        old.close()
        try:
            with translated("rewrite", self.path):
                directories.clear(self.path)
                return build(self.path, self.quota, lambda new: new.put_namespaces(namespaces))
        except StoreFailed as error:
            self._fail(str(error))
            raise

    def _fail(self, why: str) -> None:
        self._generation = None
        self.failed = True
        _log.error("%s is out of use until the next start: %s", self.path, why)

    def _check_process(self, op: str) -> None:
        # LMDB works in a forked child without an error, and damages the file.
        if self._process != os.getpid():
            raise StoreFailed(op, f"opened by process {self._process}; a forked child must not use it")

    def _claim_writer(self) -> None:
        # LMDB accepts a write from another thread, and hangs at the next one.
        thread = threading.get_ident()
        if self._writer is None:
            self._writer = thread
        elif self._writer != thread:
            raise RuntimeError(
                f"{self.path} is written by thread {self._writer}; thread {thread} must not write"
            )
