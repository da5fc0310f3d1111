"""vLLM's scheduler and tiering manager, as far as a tier sees them; the interface is that of `vllm_twin`."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import vllm_twin as twin
from support.patience import PATIENCE_S

from kvtcd.client.connections import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS = 64
ROW_BYTES = TOKENS * 384


@dataclass
class Scheduler:
    """What vLLM's scheduler and tiering manager do with a tier, as far as a tier sees it.

    Attributes:
        steps: how often the last lookup had to ask.
        asked: threads that sent something to the daemon, each time.
    """

    tier: Any
    primary: np.ndarray
    jobs: int = 0
    requests: dict[str, twin.ReqContext] = field(default_factory=dict)
    steps: int = 0
    asked: list[threading.Thread] = field(default_factory=list)

    def _call(self, call: Any, *arguments: Any) -> Any:
        before = len(self.asked)
        result = call(*arguments)
        assert threading.current_thread() not in self.asked[before:], "the scheduler waited for the daemon"
        return result

    def request(self, name: str, keys: list[bytes]) -> twin.ReqContext:
        context = twin.ReqContext(name, ends={key: (i + 1) * TOKENS for i, key in enumerate(keys)})
        self._call(self.tier.on_new_request, context)
        return self.requests.setdefault(name, context)

    def lookup(self, name: str, keys: list[bytes]) -> list[str]:
        """Ask until nothing is RETRY, a step at a time; the longest that may take is the tier's own."""
        context = self.request(name, keys)
        deadline, self.steps = time.monotonic() + 2 * PATIENCE_S, 0
        while True:
            self.steps += 1
            answers = [self._call(self.tier.lookup, key, context).name for key in keys]
            if "RETRY" not in answers:
                return answers
            assert time.monotonic() < deadline, "RETRY has no end"
            self._call(self.tier.on_schedule_end, None)
            time.sleep(0.01)

    def transfer(self, name: str, keys: list[bytes], chunk_rows: list[int], *, load: bool) -> twin.JobResult:
        self.jobs += 1
        job = twin.TransferJob(self.jobs, keys, np.array(chunk_rows), load, self.request(name, keys))
        self._call(self.tier.submit_load if load else self.tier.submit_store, job)
        return self.results(1)[0]

    def results(self, count: int) -> list[twin.JobResult]:
        results: list[twin.JobResult] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(results) < count:
            results += self._call(self.tier.get_finished_jobs)
            assert time.monotonic() < deadline, "a job has no result"
            time.sleep(0.01)
        return results

    def counts(self) -> dict[str, float]:
        return {labels[0]: value for (_, labels), value in self.tier.get_stats().counters.items()}

    def connected(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.tier.get_stats().gauges["vllm:kvtcd_up"] != 1.0:
            assert time.monotonic() < deadline, "the tier does not find its daemon"
            time.sleep(0.02)


@contextmanager
def engine(
    address: Path, model: Path, *, wait: bool = True, isa: str = "vec", engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Scheduler]:  # fmt: skip
    """An engine's life."""
    with pytest.MonkeyPatch.context() as patch:
        tier_class = twin.install(patch, isa).KvtcdTier
        primary = twin.rows(16, ROW_BYTES)
        tier = tier_class(
            offloading_spec=twin.spec(str(model), **(engine or {})), primary_kv_view=memoryview(primary),
            tier_type="KvtcdTier", backpressure_detector=None, socket=str(address),
            **({"retry_seconds": PATIENCE_S, "timeout_seconds": PATIENCE_S} | settings),
        )  # fmt: skip
        scheduler, exchange = Scheduler(tier, primary), Connection.exchange

        def noted(connection: Connection, *arguments: Any) -> Any:
            scheduler.asked.append(threading.current_thread())
            return exchange(connection, *arguments)

        patch.setattr(Connection, "exchange", noted)
        try:
            if wait:
                scheduler.connected()
            yield scheduler
        finally:
            tier.shutdown()


def keys_of(count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) + bytes(4) for _ in range(count)]


def fill(scheduler: Scheduler, chunk_rows: list[int], seed: int) -> np.ndarray:
    data = np.random.default_rng(seed).integers(-100, 100, (len(chunk_rows), ROW_BYTES), dtype=np.int8)
    scheduler.primary[chunk_rows, :ROW_BYTES] = data
    return data


def stored(scheduler: Scheduler, keys: list[bytes], seed: int = 0) -> np.ndarray:
    data = fill(scheduler, list(range(len(keys))), seed)
    assert scheduler.lookup("store", keys) == ["MISS"] * len(keys)
    assert scheduler.transfer("store", keys, list(range(len(keys))), load=False).success
    scheduler.tier.on_request_finished(scheduler.requests.pop("store"))
    return data
