"""What clients do, and what came of it."""

from __future__ import annotations

import hashlib
import random
import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY

from kvtcd.client import BlockHead, Client
from kvtcd.core.errors import KvtcdError
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.lab.daemon import Daemon

NUMBERS = 20_000
"""Blocks that there are in this world: more than both tiers hold."""
NAMESPACES = ("left", "right")
TRANSIENT = "passing"


def key(number: int) -> EngineKey:
    """Name a block."""
    return EngineKey(number.to_bytes(32, "big"))


def identity(name: str) -> Identity:
    """Return an identity that only the namespace of this name has."""
    return replace(IDENTITY, model=name, weights=hashlib.sha256(name.encode()).hexdigest())


def body(number: int) -> bytes:
    """Return the bytes that a number stands for, half of them alike, so that packing pays."""
    half = np.random.default_rng(number).integers(0, 255, BLOCK_BYTES // 2, dtype=np.uint8).tobytes()
    return half + bytes(BLOCK_BYTES - len(half))


class Traffic:
    """What clients do, and what came of it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.over = daemon, threading.Event()
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, seed: int) -> None:
        """Be one client until it is over."""
        luck = random.Random(seed)
        acts = (self.store, self.store_many, self.fetch, self.fetch, self.fetch_many, self.match, self.move,
                self.pin, self.delete, self.hang_up, self.share, self.come_and_go, self.look)  # fmt: skip
        while not self.over.is_set():
            with self.daemon.client() as client:  # a connection of its own for some acts
                for _ in range(200):
                    act = luck.choice(acts)
                    try:
                        act(client, luck)
                        self.done[act.__name__] += 1
                    except KvtcdError as error:
                        self.refused[f"{act.__name__}: {type(error).__name__}"] += 1
                    if self.over.is_set():
                        return

    def number(self, luck: random.Random) -> int:
        """Draw a block; some are asked for much more often than others."""
        return min(int(luck.paretovariate(0.4)), NUMBERS) - 1

    def store(self, client: Client, luck: random.Random) -> None:
        number = self.number(luck)
        head = BlockHead(key(number), BLOCK_TOKENS, 0)
        client.put(luck.choice(NAMESPACES), head, body(number), durable=luck.random() < 0.1)

    def store_many(self, client: Client, luck: random.Random) -> None:
        numbers = {self.number(luck) for _ in range(16)}
        blocks = [(BlockHead(key(number), BLOCK_TOKENS, 0), body(number)) for number in numbers]
        client.put_many(luck.choice(NAMESPACES), blocks)

    def fetch(self, client: Client, luck: random.Random) -> None:
        number = self.number(luck)
        self.check(number, client.get(luck.choice(NAMESPACES), key(number)))

    def fetch_many(self, client: Client, luck: random.Random) -> None:
        numbers = list({self.number(luck) for _ in range(16)})
        answers = client.get_many(luck.choice(NAMESPACES), [key(number) for number in numbers])
        for number, (_, data) in zip(numbers, answers, strict=True):
            if data is not None:
                self.check(number, data)

    def match(self, client: Client, luck: random.Random) -> None:
        client.match(luck.choice(NAMESPACES), [key(self.number(luck)) for _ in range(256)])

    def move(self, client: Client, luck: random.Random) -> None:
        keys = [key(self.number(luck)) for _ in range(16)]
        client.ended(
            (client.demote if luck.random() < 0.5 else client.prefetch)(luck.choice(NAMESPACES), keys)
        )

    def pin(self, client: Client, luck: random.Random) -> None:
        found = client.match(luck.choice(NAMESPACES), [key(self.number(luck)) for _ in range(4)], lease=2.0)
        if found.lease and luck.random() < 0.5:
            client.give_back(found.lease.id)

    def delete(self, client: Client, luck: random.Random) -> None:
        client.delete(luck.choice(NAMESPACES), key(self.number(luck)))

    def hang_up(self, client: Client, luck: random.Random) -> None:
        """Begin to send or to ask, and go away."""
        del client
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(str(self.daemon.socket))
            path = f"/v1/namespaces/left/blocks/{key(self.number(luck)).hex()}"
            if luck.random() < 0.5:
                head = f"PUT {path}?tokens={BLOCK_TOKENS}&first_token=0 HTTP/1.1\r\nHost: kvtcd\r\n"
                head += f"Content-Type: application/octet-stream\r\nContent-Length: {BLOCK_BYTES}\r\n\r\n"
                wire.sendall(head.encode() + bytes(luck.randrange(BLOCK_BYTES)))
            else:
                wire.sendall(f"GET {path} HTTP/1.1\r\nHost: kvtcd\r\n\r\n".encode())

    def share(self, client: Client, luck: random.Random) -> None:
        """Fetch into memory that the daemon maps too."""
        numbers = list({self.number(luck) for _ in range(8)})
        with client.region(len(numbers) * BLOCK_BYTES) as region:
            parts = [region.memory[i * BLOCK_BYTES :][:BLOCK_BYTES] for i in range(len(numbers))]
            answers = list(client.get_many(luck.choice(NAMESPACES), [key(n) for n in numbers], out=parts))
            for number, (_, data) in zip(numbers, answers, strict=True):
                if data is not None:
                    self.check(number, data)
            del answers, data
            for part in parts:
                part.release()

    def come_and_go(self, client: Client, luck: random.Random) -> None:
        """Make a namespace of one's own and remove it."""
        if luck.random() < 0.1:
            name = f"{TRANSIENT}-{luck.randrange(4)}"
            client.register(name, identity(name))
            client.put(name, BlockHead(key(1), BLOCK_TOKENS, 0), body(1))
            client.purge(name)

    def look(self, client: Client, luck: random.Random) -> None:
        del luck
        client.stats()

    def check(self, number: int, data: bytes | bytearray | memoryview) -> None:
        """Hold bytes against the number they were asked for by."""
        if bytes(data) != body(number):
            self.wrong.append(f"block {number}")

    def listen(self) -> None:
        """Follow what the daemon tells until it is over."""
        with suppress(KvtcdError), self.daemon.client() as client:
            for _ in client.events():
                self.done["notice"] += 1
                if self.over.is_set():
                    return
