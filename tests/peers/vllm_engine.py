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

from daemons import until
from support.patience import PATIENCE_S

PROCESS = Path(__file__).parent / "vllm_process.py"
START_S, ANSWER_S = 900.0, 600.0
"""They end a hang; an engine takes minutes to start on a machine with much other work."""
BLOCK, CHUNK = 32, 64
PATIENT = {"retry_seconds": PATIENCE_S, "timeout_seconds": PATIENCE_S}
"""A busy machine must not turn hits into misses."""


def by_tier(socket: Path, *, chunk: int = CHUNK, memory: int = 64 << 20, **ours: Any) -> dict[str, Any]:
    tier = {
        "type": "KvtcdTier", "module_path": "kvtcd.integrations.vllm_tier", "socket": str(socket),
    }  # fmt: skip
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_tiering",
            "cpu_bytes_to_use": memory, "block_size": chunk, "secondary_tiers": [tier | PATIENT | ours],
        },
    }  # fmt: skip


def by_connector(socket: Path, *, chunk: int = CHUNK, memory: int = 64 << 20, **ours: Any) -> dict[str, Any]:
    options = {"socket": str(socket), "chunk_tokens": chunk, "buffer_bytes": memory}
    return {
        "kv_connector": "KvtcdConnector",
        "kv_connector_module_path": "kvtcd.integrations.vllm_connector",
        "kv_connector_extra_config": options | PATIENT | ours,
    }


WAYS = (by_tier, by_connector)
"""Make ``--kv-transfer-config`` of a daemon's socket, tokens of a chunk, host memory and more of our JSON."""


def environment() -> dict[str, str]:
    """Return variables for an engine as a user starts it: its hashes hold in its next life without a seed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"} | {
        "OMP_NUM_THREADS": "1"
    }


class Engine:
    """One life of a vLLM engine.

    Args:
        model: its folder.
        log: where vLLM writes.
        transfer: its ``--kv-transfer-config``.
        engine: further arguments of `vllm.LLM`.
    """

    def __init__(
        self, model: Path, log: Path, transfer: dict[str, Any], *, dtype: str = "float32", **engine: Any
    ) -> None:
        self._settings = {
            "model": str(model), "dtype": dtype, "block_size": BLOCK, "transfer": transfer,
        } | engine  # fmt: skip
        self._log = log

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env=environment(), start_new_session=True,
            )  # fmt: skip
        self._say(self._settings, START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            code = self._process.wait(ANSWER_S)
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
        self._process.stdin.close()
        self._process.stdout.close()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def read(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        """Let it read a prompt and go on; `cached` says how many tokens it did not compute."""
        return self._say({"do": "generate", "prompts": [tokens], **options}, ANSWER_S)[0]

    def forget(self) -> None:
        """Empty its own caches, so that only the daemon has anything."""
        until(self._forgets)

    def _forgets(self) -> bool:
        emptied = self._say({"do": "forget"}, ANSWER_S)
        if not emptied:
            self.read([1], max_tokens=1)  # it learns in a step that what it stored has left its pages
        return emptied

    def finds_again(self, tokens: list[int], wanted: list[int], **options: Any) -> None:
        """Read, right each time, until all chunks of a prompt come from the daemon: it is found by itself."""

        def finds() -> bool:
            self.forget()
            back = self.read(tokens, **options)
            assert back["tokens"] == wanted
            return back["cached"] == len(tokens) // CHUNK * CHUNK

        until(finds, self.chunks)

    def chunks(self) -> dict[str, float]:
        """Return what became of chunks so far."""
        counters = self._say({"do": "counters"}, ANSWER_S)
        prefix = "vllm:kvtcd_chunks:"
        return {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)}
