"""Traces of requests, as the Mooncake project publishes them: one JSON object a line.

::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2353]}

`timestamp` is in milliseconds. `hash_ids` name the blocks of 512 tokens of the input: equal ids stand for
equal tokens after equal prefixes; the last block may be partial.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvtcd.core.errors import BadRequest, ConfigError, Corrupt
from kvtcd.core.fields import Fields, json_object
from kvtcd.core.keys import RecordKey

BLOCK_TOKENS = 512
_LAST_MS = 1e15
_MOST_TOKENS = 1 << 40
_IDS = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came, in seconds, and what it read.

    Attributes:
        at: seconds since the trace began.
        tokens: of its input.
        blocks: keys of its blocks, in order.
        block_tokens: of each of them but the last.
        token_bytes: raw bytes of a token in all layers; None where the trace does not say.
    """

    at: float
    tokens: int
    blocks: tuple[RecordKey, ...]
    block_tokens: int = BLOCK_TOKENS
    token_bytes: int | None = None


def read_trace(path: Path) -> list[Request]:
    """Read a trace; equal ids become the same key.

    Raises:
        ConfigError: it cannot be read, is empty, or a line is not a request.
    """
    keys: dict[int, RecordKey] = {}
    try:
        with path.open("rb") as lines:
            requests = list(_requests(path, lines, keys))
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {os.strerror(error.errno or 0)}") from None
    if not requests:
        raise ConfigError(path, "", "holds no requests")
    return requests


def _requests(path: Path, lines: Iterable[bytes], keys: dict[int, RecordKey]) -> Iterator[Request]:
    before = 0.0
    for number, line in enumerate(lines, start=1):
        try:
            request = _request(Fields(json_object(line), "request"), keys, before)
        except Corrupt as error:
            raise ConfigError(path, f"line {number}", f"is no request: {error.why}") from None
        except BadRequest as error:
            raise ConfigError(path, f"line {number}", str(error)) from None
        before = request.at
        yield request


def _request(body: Fields, keys: dict[int, RecordKey], before: float) -> Request:
    at = body.number("timestamp", 0, _LAST_MS) / 1000
    if at < before:
        raise BadRequest("timestamp", "is before that of the line above")
    tokens, ids = body.integer("input_length", 1, _MOST_TOKENS), body.integers("hash_ids", *_IDS)
    if len(ids) != -(-tokens // BLOCK_TOKENS):
        raise BadRequest("hash_ids", f"{len(ids)} blocks of {BLOCK_TOKENS} tokens for {tokens} tokens")
    return Request(at, tokens, tuple(keys.setdefault(i, _key(i)) for i in ids))


def _key(number: int) -> RecordKey:
    return RecordKey(blake2b(b"%d" % number, digest_size=32).digest())
