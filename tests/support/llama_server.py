"""llama.cpp's own server, out of the package `xllamacpp`, as a process that ends when its stdin does."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def llama_server(model: Path, slots: Path, **settings: object) -> Iterator[str]:
    """Run a server of one thread with some settings; yield its address."""
    told = {"model": str(model), "slots": str(slots), "settings": settings}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, json.dumps(told), "--slot-save-path", str(slots)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield next(line.strip() for line in process.stdout if line.startswith("http"))
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def complete(url: str, prompt: object, tokens: int, slot: int = 0) -> dict[str, Any]:
    """Have a slot go on from a prompt, the likeliest token each time."""
    body = {
        "prompt": prompt, "n_predict": tokens, "id_slot": slot, "temperature": 0, "cache_prompt": True,
        "return_tokens": True,
    }  # fmt: skip
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310 - our own server
        return json.load(response)


def _serve(model: str, slots: str, settings: dict[str, Any]) -> None:
    import xllamacpp  # noqa: PLC0415 - in this process alone

    params = xllamacpp.CommonParams()
    params.model.path, params.slot_save_path = model, f"{slots}/"
    params.n_ctx, params.n_parallel, params.port = 2048, 1, 0
    params.endpoint_slots, params.warmup, params.fit_params = True, False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    for name, value in settings.items():
        enum = {
            "cache_type_k": xllamacpp.ggml_type,
            "cache_type_v": xllamacpp.ggml_type,
            "flash_attn_type": xllamacpp.llama_flash_attn_type,
        }.get(name)
        setattr(params, name, getattr(enum, value) if enum else value)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)  # noqa: T201 - read by the test
    sys.stdin.read()


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
