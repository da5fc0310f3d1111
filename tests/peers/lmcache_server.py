"""LMCache's server, in a process of its own, whose only L2 adapter is ours."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

from support.patience import PATIENCE_S
from support.ports import free_port
from vllm_engine import environment

START_S = 600.0
"""It ends a hang; imports alone take a minute on a machine with much other work."""
ADAPTER = {
    "type": "plugin", "module_path": "kvtcd.integrations.lmcache_l2", "class_name": "KvtcdL2Adapter",
}  # fmt: skip
PATIENT = {"lookup_seconds": PATIENCE_S, "timeout_seconds": PATIENCE_S}
"""A busy machine must not turn hits into misses."""
HEARTBEAT_S = 30.0
"""How late the server may answer before an engine does without it; after 120 s it forgets the engine."""


def adapter(daemon: Path, **parameters: Any) -> str:
    """Return what `--l2-adapter` wants."""
    return json.dumps(ADAPTER | {"adapter_params": {"socket": str(daemon)} | PATIENT | parameters})


class LMCacheServer:
    """One life of a server.

    Args:
        daemon: socket of the daemon.
        log: where the server writes.
        chunk: tokens of a chunk.
        parameters: more of the adapter's.
    """

    def __init__(self, daemon: Path, log: Path, *, chunk: int, **parameters: Any) -> None:
        self._log = log
        self._http = self._port = free_port()
        while self._port == self._http:
            self._port = free_port()
        self._command = [
            sys.executable, "-m", "lmcache.v1.multiprocess.http_server",
            "--http-host", "127.0.0.1", "--http-port", str(self._http), "--port", str(self._port),
            "--l1-size-gb", "0.25", "--chunk-size", str(chunk), "--eviction-policy", "LRU",
            "--supported-transfer-mode", "auto", "--disable-metrics",
            "--l2-adapter", adapter(daemon, **parameters),
        ]  # fmt: skip

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment() | {"LMCACHE_TRACK_USAGE": "false"},
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise AssertionError(f"the server did not start:\n{self._tail()}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def transfer(self) -> dict[str, Any]:
        """What vLLM takes as `kv_transfer_config` for this server."""
        return {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": self._port,
                "lmcache.mp.heartbeat_interval": HEARTBEAT_S,
            },
        }  # fmt: skip

    def objects(self) -> dict[str, int]:
        """Return what became of objects so far, as the adapter says."""
        status = self._get("/status")
        return _find(status, "KvtcdL2Adapter")["objects"]

    def _ready(self) -> bool:
        try:
            self._get("/healthcheck")
        except (URLError, ConnectionError):
            return False
        return True

    def _get(self, path: str) -> Any:
        with urlopen(f"http://127.0.0.1:{self._http}{path}", timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


def _find(status: Any, name: str) -> Any:
    """Return the status of the adapter of this type, wherever it is in the server's."""
    if isinstance(status, dict):
        if status.get("type") == name:
            return status
        status = list(status.values())
    if isinstance(status, list):
        return next((found for one in status if (found := _find(one, name))), None)
    return None
