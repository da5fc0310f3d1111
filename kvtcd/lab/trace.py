"""Traces of requests, as the Mooncake project publishes them: one JSON object a line.

::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2353]}

`timestamp` is in milliseconds. `hash_ids` name the blocks of 512 tokens of the input: equal ids stand for
equal tokens after equal prefixes; the last block may be partial.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvtcd.core.errors import ConfigError
from kvtcd.core.keys import RecordKey

BLOCK_TOKENS = 512
_FOREVER_MS = 1e15


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
        with path.open(encoding="utf-8") as lines:
            requests = list(_requests(path, lines, keys))
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, "", f"is not UTF-8: {error.reason}") from None
    if not requests:
        raise ConfigError(path, "", "holds no requests")
    return requests


def _requests(path: Path, lines: Iterator[str], keys: dict[int, RecordKey]) -> Iterator[Request]:
    before = 0.0
    for number, line in enumerate(lines, start=1):
        try:
            request = _request(json.loads(line), keys, before)
        except (ValueError, KeyError, TypeError) as error:
            why = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(path, f"line {number}", why) from None
        before = request.at
        yield request


def _request(body: Any, keys: dict[int, RecordKey], before: float) -> Request:  # noqa: ANN401 - whatever JSON holds
    stamp, tokens, ids = body["timestamp"], body["input_length"], body["hash_ids"]
    if not isinstance(stamp, int | float) or not 0 <= stamp < _FOREVER_MS:
        raise ValueError("timestamp: is not a number of milliseconds")
    if stamp / 1000 < before:
        raise ValueError("timestamp: is before that of the line above")
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError("input_length: is not a number of tokens")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError("hash_ids: is not a list of integers")
    if len(ids) != -(-tokens // BLOCK_TOKENS):
        raise ValueError(f"hash_ids: {len(ids)} blocks of {BLOCK_TOKENS} tokens for {tokens} tokens")
    return Request(stamp / 1000, tokens, tuple(keys.setdefault(i, _key(i)) for i in ids))


def _key(number: int) -> RecordKey:
    return RecordKey(blake2b(b"%d" % number, digest_size=32).digest())
