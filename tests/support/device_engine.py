"""An engine in a process of its own, which has blocks on a GPU: it does what it is told, line by line."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block

from kvtcd.client import BlockHead, Client
from kvtcd.core.errors import KvtcdError
from kvtcd.core.keys import EngineKey
from kvtcd.cuda.driver import Driver

ALLOCATION, BEGIN, BLOCKS = 4 << 20, 4096, 8


class Engine:
    """The process, as a test drives it."""

    def __init__(self, socket: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.device_engine", str(socket)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def tell(self, *words: object) -> Any:
        """Have it do something; return what it says."""
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Model:
    """What the process has: one allocation, a part of which is a region of `BLOCKS` blocks."""

    def __init__(self, socket: str) -> None:
        self.client, self.driver = Client(socket), Driver.load()
        (self.device, *_) = self.driver.devices.values()
        self.context = self.driver.retain(self.device)
        with self.driver.current(self.context):
            self.stream = self.driver.create_stream()
            self.memory = self.driver.allocate(ALLOCATION)
        self.region = None

    def register(self) -> str:
        return self.client.register("demo", IDENTITY).name

    def share(self) -> list[str]:
        self.region = self.client.device_region((self.memory + BEGIN, BLOCKS * BLOCK_BYTES))
        return self.said()

    def said(self) -> list[str]:
        return [self.region.path, self.region.why]

    def write(self, place: int, number: int | None) -> None:
        data = block(number) if number is not None else bytes(BLOCK_BYTES)
        source = ctypes.create_string_buffer(data, BLOCK_BYTES)
        with self.driver.current(self.context):
            at = self.memory + BEGIN + place * BLOCK_BYTES
            self.driver.write(at, [(ctypes.addressof(source), BLOCK_BYTES)], self.stream)
            self.region.record(self.stream)
            self.driver.finish(self.stream)

    def holds(self, place: int) -> int | None:
        found = ctypes.create_string_buffer(BLOCK_BYTES)
        with self.driver.current(self.context):
            at = self.memory + BEGIN + place * BLOCK_BYTES
            self.driver.read(at, [(ctypes.addressof(found), BLOCK_BYTES)], self.stream)
            self.driver.finish(self.stream)
        return next((n for n in range(32) if block(n) == found.raw), None)

    def part(self, place: int):
        return self.region[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]

    def put(self, place: int, number: int) -> str:
        head = BlockHead(_key(number), BLOCK_TOKENS, 0)
        return self.client.put("demo", head, self.part(place)).outcome

    def demote(self, *numbers: int) -> None:
        """Have blocks packed, and on disk alone."""
        self.client.demote("demo", [_key(number) for number in numbers])

    def fill(self, *asked: int) -> list[int | None]:
        """Read blocks of these numbers into the first places."""
        parts = [self.part(place) for place in range(len(asked))]
        return self.client.fill("demo", [_key(number) for number in asked], parts)

    def tensors(self, number: int) -> list[object]:
        """Store and read a block of torch's memory, and never wait for a stream; say how that went."""
        import torch  # noqa: PLC0415 - only where there is a device

        memory = torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        source = torch.frombuffer(bytearray(block(number)), dtype=torch.uint8)
        with self.client.device_region(memory) as region:
            memory[:BLOCK_BYTES].copy_(source.pin_memory(), non_blocking=True)
            region.record(torch.cuda.current_stream().cuda_stream)
            head = BlockHead(_key(number), BLOCK_TOKENS, 0)
            outcome = self.client.put("demo", head, region[:BLOCK_BYTES]).outcome
            self.client.fill("demo", [_key(number)], [region[BLOCK_BYTES:]])
            return [region.path, region.why, outcome, bool((memory[BLOCK_BYTES:].cpu() == source).all())]

    def close(self) -> None:
        self.region.close()

    def free(self) -> None:
        with self.driver.current(self.context):
            self.driver.free(self.memory)


def _key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(8, "big"))


def main() -> None:
    """Obey."""
    model = Model(sys.argv[1])
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = getattr(model, what)(*arguments)
        except KvtcdError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201 - to the test


if __name__ == "__main__":
    main()
