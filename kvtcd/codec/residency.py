"""Which profiles' bases lie on a device: those last used, as many as its budget holds.

A basis takes 0.2 to 3.3 GB, and a host serves several models. What is in use is never given up: while a call
launches, it is counted as a user, and what it has launched is known to torch, which reuses the memory of a
basis only behind that (`Tensor.record_stream`). The budget also counts what others take of the device for the
codec, such as nvCOMP's scratch; for that bases make room.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kvtcd.codec.transform import Transform

_log = logging.getLogger(__name__)


@dataclass
class _Entry:
    device: torch.device
    nbytes: int
    users: int = 0
    value: Sequence[Transform] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the value is made, so that others wait for it and not for each other."""


class Residency:
    """Keeps transforms on devices; from any thread. Without a limit a device keeps all.

    Attributes:
        lock: on what it keeps and counts, and on what is to be counted with it.
    """

    def __init__(self) -> None:
        # Objects that give memory back when they are collected may be so while this thread has the lock.
        self.lock = threading.RLock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # least recently used first
        self._limits: dict[torch.device, int] = {}
        self._taken: dict[torch.device, int] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._first: dict[torch.device, Callable[[], None]] = {}

    def limit(self, device: torch.device, nbytes: int) -> None:
        """Set the budget of a device, before anything is held there."""
        self._limits[device] = nbytes

    def first_to_go(self, device: torch.device, drop: Callable[[], None]) -> None:
        """Have something give up what it has taken of a device before a basis leaves it, under the lock."""
        self._first[device] = drop

    def used(self, device: torch.device) -> int:
        """Return the bytes that count against the budget of a device."""
        with self.lock:
            return self._used(device)

    @contextmanager
    def hold(
        self, key: Hashable, device: torch.device, nbytes: int, make: Callable[[], Sequence[Transform]]
    ) -> Iterator[Sequence[Transform]]:
        """Use transforms, and keep them where they are meanwhile.

        Args:
            key: what tells them from others on the same device.
            device: where they are used, by what is launched on the current stream.
            nbytes: that they take.
            make: puts them there, if they are not.

        Raises:
            torch.OutOfMemoryError: they do not fit beside what is in use.
        """
        with self.lock:
            entry = self._entries.get((device, key))
            if entry is None:
                self._make_room(device, nbytes)
                entry = self._entries[device, key] = _Entry(device, nbytes)
            self._entries.move_to_end((device, key))
            entry.users += 1
        try:
            with entry.lock:
                if entry.value is None:
                    entry.value = self._made(device, make)
            yield entry.value
        finally:
            for transform in entry.value or ():
                transform.in_use()
            with self.lock:
                entry.users -= 1
                if entry.value is None and not entry.users:
                    self._entries.pop((device, key), None)

    def take(self, device: torch.device, nbytes: int) -> None:
        """Count memory that something else has on a device; unused bases make room for it."""
        with self.lock:
            self._taken[device] = self._taken.get(device, 0) + nbytes
            self._evict(device, 0)

    def take_spare(self, device: torch.device, nbytes: int) -> bool:
        """Count memory as `take` does, if it has room beside all that is there; tell whether."""
        with self.lock:
            limit = self._limits.get(device)
            fits = limit is None or self._used(device) + nbytes <= limit
            self._taken[device] = self._taken.get(device, 0) + (nbytes if fits else 0)
            return fits

    def give_back(self, device: torch.device, nbytes: int) -> None:
        """Count it no more."""
        with self.lock:
            self._taken[device] -= nbytes

    def drop_unused(self, device: torch.device) -> None:
        """Give up every basis that is not in use."""
        with self.lock:
            self._evict(device, None)

    def _used(self, device: torch.device) -> int:
        held = sum(entry.nbytes for entry in self._entries.values() if entry.device == device)
        return held + self._taken.get(device, 0)

    def _make_room(self, device: torch.device, nbytes: int) -> None:
        self._evict(device, nbytes)
        limit, used = self._limits.get(device), self._used(device)
        if limit is not None and used + nbytes > limit:
            raise torch.OutOfMemoryError(
                f"{nbytes:,} bytes of bases do not fit on {device}: of the {limit:,} bytes of codec.memory"
                f" {used:,} are in use"
            )

    def _evict(self, device: torch.device, needed: int | None) -> None:
        """Give up unused bases, the least recently used first, until so much more fits; None: all of them."""
        limit = self._limits.get(device)

        def fits() -> bool:
            return needed is not None and (limit is None or self._used(device) + needed <= limit)

        if device in self._first and not fits():
            self._first[device]()
        for key, entry in list(self._entries.items()):
            if fits():
                return
            if entry.device == device and not entry.users:
                del self._entries[key]
                _log.info("%s bytes of bases leave %s", f"{entry.nbytes:,}", device)

    def _made(self, device: torch.device, make: Callable[[], Sequence[Transform]]) -> Sequence[Transform]:
        """Make transforms; when that returns they are there for every stream.

        All of one device on one stream, since torch reuses memory only for the stream that it was taken on.
        """
        if device.type != "cuda":
            return make()
        with self.lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch says no types
        with torch.cuda.stream(stream):
            made = make()
        stream.synchronize()
        return made
