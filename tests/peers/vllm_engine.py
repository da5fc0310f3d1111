"""Drives `vllm_process` from a test."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

PROCESS = Path(__file__).parent / "vllm_process.py"
START_S, ANSWER_S = 900.0, 600.0
"""Minutes pass on a machine with much other work."""
BLOCK, CHUNK = 32, 64


def by_tier(ours: dict[str, Any], chunk: int, cpu_bytes: int) -> dict[str, Any]:
    tier = {"type": "KvtcdTier", "module_path": "kvtcd.integrations.vllm_tier"} | ours
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_tiering",
            "cpu_bytes_to_use": cpu_bytes, "block_size": chunk, "secondary_tiers": [tier],
        },
    }  # fmt: skip


def by_connector(ours: dict[str, Any], chunk: int, cpu_bytes: int) -> dict[str, Any]:
    return {
        "kv_connector": "KvtcdConnector",
        "kv_connector_module_path": "kvtcd.integrations.vllm_connector",
        "kv_connector_extra_config": {"chunk_tokens": chunk, "buffer_bytes": cpu_bytes} | ours,
    }


TRANSFERS = {"tier": by_tier, "connector": by_connector}
"""Makes ``--kv-transfer-config`` of our JSON, tokens of a chunk and host memory to use."""


class Engine:
    """One life of a vLLM engine that keeps its cache in a daemon.

    Args:
        model: its folder.
        socket: of the daemon.
        log: where vLLM writes.
        way: ``tier``, below vLLM's offloading, or ``connector``.
        ours: more of its JSON.
        chunk: tokens of a chunk.
        engine: further arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        model: Path,
        socket: Path,
        log: Path,
        *,
        way: str = "tier",
        dtype: str = "float32",
        chunk: int = CHUNK,
        ours: dict[str, Any] | None = None,
        cpu_bytes: int = 64 << 20,
        **engine: Any,
    ) -> None:
        said = {
            "socket": str(socket),
            "retry_seconds": 60.0, "timeout_seconds": 60.0,  # a busy machine must not turn hits into misses
        } | (ours or {})  # fmt: skip
        self._settings = {
            "model": str(model), "dtype": dtype, "block_size": BLOCK,
            "transfer": TRANSFERS[way](said, chunk, cpu_bytes),
        } | engine  # fmt: skip
        self._log = log

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        self._say(self._settings, START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            code = self._process.wait(300)
        except subprocess.TimeoutExpired:
            self._kill()
            raise
        finally:
            self._process.stdout.close()
        assert code == 0, self._tail()

    def _say(self, command: dict[str, Any], seconds: float) -> Any:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            self._kill()
            raise AssertionError(f"the engine said nothing in {seconds:g} s:\n{self._tail()}")
        return json.loads(answer)

    def _kill(self) -> None:
        """End it, and the processes that it may have of its own."""
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def read(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        """Let it read a prompt and go on; `cached` says how many tokens it did not compute."""
        return self._say({"do": "generate", "prompts": [tokens], **options}, ANSWER_S)[0]

    def forget(self) -> None:
        """Empty its own caches, so that only the daemon has anything."""
        assert self._say({"do": "forget"}, ANSWER_S)

    def chunks(self) -> dict[str, float]:
        """Return what became of chunks so far."""
        counters = self._say({"do": "counters"}, ANSWER_S)
        prefix = "vllm:kvtcd_chunks:"
        return {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)}
