"""SGLang's HiCache storage: pages that leave host memory go to kvtcd, and come back in another life.

Set up by ``--hicache-storage-backend dynamic`` and ``--hicache-storage-backend-extra-config`` with
``"module_path": "kvtcd.integrations.sglang_hicache"`` and ``"class_name": "KvtcdHiCache"``. SGLang calls from
threads of its own, and waits in collectives for the slowest rank: so no call takes longer than its time, and
none raises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.version import __version__
from torch import Tensor
from transformers import AutoConfig

from kvtcd.client import Client
from kvtcd.integrations.link import Link
from kvtcd.integrations.sglang_identity import Parameters, Ranks, model_of
from kvtcd.integrations.sglang_pools import KV, Pools

_LOG = logging.getLogger("sglang.kvtcd")


class _Guard:
    """Ends whatever is raised inside it; the engine lives on, and the log has why."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            _LOG.error("kvtcd: a call of SGLang failed", exc_info=error)
        return isinstance(error, Exception)


_GUARD = _Guard()


class KvtcdHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """A storage backend of HiCache that keeps pages in a kvtcd daemon.

    Args:
        storage_config: by SGLang; its `extra_config` has `Parameters` beside SGLang's own.
        kwargs: by SGLang.

    Raises:
        BadRequest: the extra configuration does not say enough, or something impossible.
        Unavailable: a weight or adapter file is missing or cannot be read.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ANN401, ARG002 - SGLang's
        given = Parameters.of(storage_config.extra_config or {})
        model, unchanged = model_of(given, storage_config.model_name or "", _config)
        seconds = float(given.timeout_seconds)
        self._link = Link(Client(given.socket, timeout=seconds), _LOG, seconds=seconds, valid=unchanged)
        ranks = Ranks(
            tp=(storage_config.tp_rank, storage_config.tp_size),
            pp=(storage_config.pp_rank, storage_config.pp_size),
            cp=(storage_config.attn_cp_rank, storage_config.attn_cp_size),
            dcp=(storage_config.dcp_rank, storage_config.dcp_size),
            replicated=storage_config.is_mla_model,
        )
        writes = bool(storage_config.is_storage_writer)
        self._pools = Pools(self._link, given, ranks, model, writes=writes, version=__version__, log=_LOG)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401 - SGLang's
        """Take the pool of keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        with _GUARD:
            self._pools.register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401 - SGLang's
        """Take a further pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        with _GUARD:
            self._pools.register(str(host_pool_name), host_pool)

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ANN401, ARG002 - SGLang's
        """Fetch pages into the pool of keys and values."""
        with _GUARD:
            return self._pools.fetch(KV, keys, host_indices)
        return [False] * len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ANN401 - SGLang's
        """Store pages of the pool of keys and values."""
        with _GUARD:
            return self._pools.put(KV, keys, host_indices, getattr(extra_info, "prefix_keys", None))
        return [False] * len(keys)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ANN401, ARG002 - SGLang's
        """Return how many leading pages are there."""
        with _GUARD:
            return self._pools.prefix(KV, keys)
        return 0

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,  # noqa: ANN401, ARG002 - SGLang's
    ) -> PoolTransferResult:
        """Say which prefixes are there with all that each pool needs for them."""
        with _GUARD:
            return self._restorable(keys, pool_transfers or ())
        return PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ANN401, ARG002 - SGLang's
        """Fetch pages into several pools."""
        done = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        for transfer in transfers:
            with _GUARD:
                keys = transfer.keys or []
                done[transfer.name] = self._pools.fetch(str(transfer.name), keys, transfer.host_indices)
        return done

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ANN401, ARG002 - SGLang's
        """Store pages of several pools, of which nobody says what they continue."""
        done = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        for transfer in transfers:
            with _GUARD:
                keys = transfer.keys or []
                done[transfer.name] = self._pools.put(str(transfer.name), keys, transfer.host_indices, None)
        return done

    def get(
        self,
        key: str,
        target_location: Tensor | None = None,
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> Tensor | None:
        """Return a page, flat."""
        flat = None if target_location is None else [target_location]
        return self.batch_get([key], flat, target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[Tensor] | None = None,
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's
    ) -> list[Tensor | None]:
        """Return pages, flat, None for each that is not there."""
        with _GUARD:
            return self._pools.fetch_flat(keys, target_locations)
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: Tensor | None = None,
        target_location: Any = None,  # noqa: ANN401 - SGLang's
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> bool:
        """Store a page, flat; tell whether it is there now."""
        return value is not None and self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Tensor] | None = None,
        target_locations: Any = None,  # noqa: ANN401, ARG002 - SGLang's
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's
    ) -> bool:
        """Store pages, flat, which are a sequence; tell whether all are there now."""
        with _GUARD:
            return values is not None and all(self._pools.put_flat(keys, values))
        return False

    def exists(self, key: str) -> bool:
        """Tell whether a page is there."""
        return self.batch_exists([key]) == 1

    def clear(self) -> bool:
        """Remove all pages of this model and rank."""
        with _GUARD:
            self._pools.clear()
            return True
        return False

    def close(self) -> None:
        """Close connections."""
        self._link.close()

    def _restorable(self, keys: list[str], transfers: Sequence[Any]) -> PoolTransferResult:
        """Return the prefixes that could go on from what is there: their lengths in pages.

        Pools of state need the pages before a prefix's end alone, the others all of them.
        """
        pages = self._pools.prefix(KV, keys)
        hits = {PoolName.KV: pages} if pages else {}
        ends = list(range(1, pages + 1))
        for transfer in transfers:
            if not ends or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # groups of blocks are a second form of the same pages, which is not kept here
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            needed = max(1, len(transfer.keys or ())) if trailing else pages
            there = self._pools.present(str(transfer.name), keys[:pages])
            held = {end for end in range(1, pages + 1) if all(there[max(0, end - needed) : end])}
            ends = [end for end in ends if end in held]
            if held:
                hits[transfer.name] = max(held)
        return PoolTransferResult(ends[-1] if ends else 0, hits, ends)


def _config(folder: Path) -> Any:  # noqa: ANN401 - a configuration of transformers
    return AutoConfig.from_pretrained(folder, local_files_only=True)
