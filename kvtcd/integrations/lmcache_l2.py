"""LMCache's L2 adapter: chunks that leave the server's memory go to kvtcd, and come back in another life.

Set up by ``--l2-adapter`` of LMCache's server as a ``plugin`` with ``module_path`` this module and
``class_name`` ``KvtcdL2Adapter``. Its controllers call from threads of their own and never wait here: what
takes time is done by three lanes, which signal an event each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from lmcache import __version__
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvtcd.client import Client
from kvtcd.core.keys import MAX_KEY, EngineKey
from kvtcd.integrations.lanes import Lane
from kvtcd.integrations.lmcache_daemon import Daemon, Name, Object
from kvtcd.integrations.lmcache_identity import HASH_BYTES, Place, Shape, salt_of
from kvtcd.integrations.lmcache_models import Models, Parameters, engine_release

_LOG = logging.getLogger("lmcache.kvtcd")
_FAILED = L2StoreResult(success=False, bytes_transferred=0)


class KvtcdL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]  # LMCache is not installed where types are checked
    """The adapter's parameters, see `Parameters`."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Read ``adapter_params``.

        Raises:
            BadRequest: a parameter is unknown, or cannot be meant.
        """
        return cls(Parameters.of(d))

    @classmethod
    def help(cls) -> str:
        """Say what the parameters are."""
        return Parameters.__doc__ or ""


class KvtcdL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # as above
    """An L2 adapter that keeps objects in a kvtcd daemon.

    Args:
        config: by LMCache, from ``adapter_params``.
        l1_memory_desc: by LMCache; objects are reached one by one.
    """

    def __init__(self, config: KvtcdL2AdapterConfig, l1_memory_desc: Any = None) -> None:  # noqa: ANN401, ARG002 - LMCache's
        super().__init__()  # no capacity: the daemon makes room by itself
        given = config.parameters
        self._salt = given.salt
        self._shortest = 1 if given.short_hashes else HASH_BYTES
        self._daemon = Daemon(
            Client(given.socket, timeout=given.lookup_seconds),
            Models(given, _LOG).facts,
            version="-".join(filter(None, (__version__, engine_release(given.variant)))),
            lookup_seconds=given.lookup_seconds,
            seconds=given.timeout_seconds,
            log=_LOG,
        )
        self._events = {name: create_event_notifier() for name in ("lookup", "load", "store")}
        self._lookups: Lane[Bitmap] = self._lane("lookup")
        self._loads: Lane[Bitmap] = self._lane("load")
        self._stores: Lane[L2StoreResult] = self._lane("store")
        self._chores: Lane[None] = Lane("kvtcd-lmcache-chores", _LOG, lambda: None)

    def get_store_event_fd(self) -> int:
        """Return what is signalled when a store ends."""
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return what is signalled when a lookup ends."""
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Return what is signalled when a load ends."""
        return int(self._events["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to store objects, which stay with the task until it ends."""
        return self._stores.submit(lambda: self._store(keys, objects), _FAILED)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return how stores ended since the last call."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Begin to look objects up, and keep what is there for a while."""
        return self._lookups.submit(lambda: self._find(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return what a lookup found, once it has ended, and once only."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Keep objects no longer on behalf of a lookup."""
        self._chores.do(lambda: self._daemon.release(list(self._names(keys).values())))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to fill objects."""
        return self._loads.submit(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return which objects a load filled, once it has ended, and once only."""
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Begin to remove objects."""
        self._chores.do(lambda: self._delete(keys))

    def close(self) -> None:
        """Let what runs end, fail what waits, stop the threads and close the events."""
        for lane in (self._lookups, self._loads, self._stores, self._chores):
            lane.close()
        self._daemon.link.close()
        for event in self._events.values():
            event.close()

    def report_status(self) -> dict[str, Any]:
        """Return counts, and whether the daemon is there; LMCache is healthy without it."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "daemon": str(self._daemon.link.client.address),
            "up": self._daemon.link.up,
            "objects": self._daemon.counts(),
        }

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        ours = self._names(keys)
        asked = {ours[i]: self._object(ours[i], one) for i, one in enumerate(objects) if i in ours}
        outcomes = self._daemon.store(list(asked.values()))
        sizes = {
            keys[i]: asked[name].memory.nbytes for i, name in ours.items() if outcomes.get(name) == "stored"
        }
        self._tell(self._notify_keys_stored, list(sizes), list(sizes.values()))
        kept = sum(outcome in ("stored", "duplicate") for outcome in outcomes.values())
        return L2StoreResult(success=kept == len(set(keys)), bytes_transferred=sum(sizes.values()))

    def _find(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> Bitmap:
        ours = self._names(keys)
        shapes = {group: _shape(layout.shapes, layout.dtypes) for group, layout in layouts.items()}
        found = self._daemon.find(list(ours.values()), shapes)
        return _bits(len(keys), [i for i, there in zip(ours, found, strict=True) if there])

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Bitmap:
        ours = self._names(keys)
        loaded = self._daemon.load([self._object(name, objects[i]) for i, name in ours.items()])
        filled = [i for i, done in zip(ours, loaded, strict=True) if done]
        self._tell(self._notify_keys_accessed, [keys[i] for i in filled])
        return _bits(len(keys), filled)

    def _delete(self, keys: Sequence[Any]) -> None:
        ours = self._names(keys)
        sizes = dict(self._daemon.delete(list(ours.values())))
        gone = {keys[i]: sizes[name] for i, name in ours.items() if name in sizes}
        self._tell(self._notify_keys_deleted, list(gone), list(gone.values()))

    def _names(self, keys: Sequence[Any]) -> dict[int, Name]:
        """Return our names of keys by their number in the list; hashes that are too short have none."""
        return {
            i: Name(
                EngineKey(key.chunk_hash),
                Place(key.model_name, key.kv_rank, key.object_group_id),
                salt_of(self._salt, key.cache_salt),
            )
            for i, key in enumerate(keys)
            if self._shortest <= len(key.chunk_hash) <= MAX_KEY
        }

    def _object(self, name: Name, one: Any) -> Object:  # noqa: ANN401 - LMCache's
        memory, facts = memoryview(one.byte_array).cast("B"), one.metadata
        sizes = facts.shapes or [facts.shape]  # several tensors, or the only one
        return Object(name, _shape(sizes, facts.dtypes or [facts.dtype]), memory)

    def _lane(self, name: str) -> Lane[Any]:
        return Lane(f"kvtcd-lmcache-{name}", _LOG, self._events[name].notify)

    def _tell(self, notify: Callable[..., None], keys: list[Any], *sizes: list[int]) -> None:
        if keys:
            notify(keys, *sizes)


def _shape(sizes: Sequence[Any], dtypes: Sequence[Any]) -> Shape:
    return Shape.of(sizes, dtypes, [dtype.itemsize for dtype in dtypes])


def _bits(length: int, ones: Sequence[int]) -> Bitmap:
    bitmap = Bitmap(length)
    for one in ones:
        bitmap.set(one)
    return bitmap
