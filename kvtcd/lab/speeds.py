"""From which length on it is faster to fetch and unpack a prefix than to read it again.

Reading n tokens takes ``a n + b n²`` seconds (products of the layers, and attention), fetching and unpacking
them ``c + d n``. Both are fitted to what was measured, with no part below zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtcd.core.errors import ConfigError

RECOMPUTE = "recompute"
_NAMES = ("constant", "linear", "square")
_MOST = 1e9
"""Tokens that no prefix has."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds for a prefix: constant, for each token, and for each token squared."""

    constant: float = 0.0
    linear: float = 0.0
    square: float = 0.0

    def at(self, tokens: float) -> float:
        """Return the seconds for so many tokens."""
        return self.constant + self.linear * tokens + self.square * tokens * tokens


@dataclass(frozen=True, slots=True)
class Speeds:
    """What reading costs, and fetching and unpacking from each source."""

    prefill: Cost
    reuse: Mapping[str, Cost]

    def break_even(self, source: str) -> int | None:
        """Return the least tokens for which a source is faster than reading; None if it never is."""
        return break_even(self.prefill, self.reuse[source])


def break_even(read: Cost, fetch: Cost) -> int | None:
    """Return the least tokens that are fetched faster than they are read; None if they never are.

    Args:
        read: in proportion to tokens, and to their square.
        fetch: constant, and in proportion to tokens.
    """
    # The positive root of square n² + linear n - constant, in the form that loses no digits.
    square, linear, constant = read.square, read.linear - fetch.linear, fetch.constant
    root = math.sqrt(linear * linear + 4 * square * constant)
    over, under = (2 * constant, linear + root) if linear > 0 else (root - linear, 2 * square)
    if over >= _MOST * under:
        return None
    return max(1, math.floor(over / under) + 1)


def known(
    bench: Path | None, prefill: float | None, reuse: float | None, overhead_ms: float, token_bytes: float
) -> Speeds | None:
    """Return the speeds that options of a command tell; None if none do.

    Args:
        bench: what `kvtcd bench ttft --json` wrote; or else
        prefill: tokens that the engine reads a second, and
        reuse: raw megabytes fetched and unpacked a second.
        overhead_ms: of a fetch, whatever its length; of what is not measured.
        token_bytes: raw bytes of a token.

    Raises:
        ConfigError: the file is wrong, one speed is missing, or speeds are said beside a file.
    """
    if bench is not None:
        if prefill is not None or reuse is not None:
            raise ConfigError("command line", "--bench", "says both speeds; leave out --prefill and --reuse")
        return measured(bench)
    if (prefill is None) != (reuse is None):
        raise ConfigError("command line", "--prefill", "goes with --reuse: say both speeds, or neither")
    if prefill is None or reuse is None:
        return None
    return given(prefill, reuse, overhead_ms, token_bytes)


def given(prefill_tokens_s: float, reuse_mb_s: float, overhead_ms: float, token_bytes: float) -> Speeds:
    """Return speeds that an operator knows.

    Args:
        prefill_tokens_s: tokens that the engine reads a second.
        reuse_mb_s: raw megabytes that are fetched and unpacked a second.
        overhead_ms: milliseconds that a fetch takes whatever its length.
        token_bytes: raw bytes of a token.
    """
    reuse = Cost(overhead_ms / 1e3, token_bytes / (reuse_mb_s * 1e6))
    return Speeds(Cost(linear=1 / prefill_tokens_s), {"packed": reuse})


def measured(path: Path) -> Speeds:
    """Return what `kvtcd bench ttft --json` measured of one model.

    Raises:
        ConfigError: it cannot be read, is something else, or of several models.
    """
    try:
        body = json.loads(path.read_bytes())
        rows = body["rows"] if body["command"] == "bench ttft" else []
        models = sorted({row["model"] for row in rows})
        if len(models) > 1:
            raise ConfigError(path, "rows", f"are of several models: {', '.join(models)}; measure one alone")
        points = _points(rows)
        prefill = _fitted(points.pop(RECOMPUTE), (1, 2))
        reuse = {source: _fitted(found, (0, 1)) for source, found in points.items()}
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        why = f"is not what `kvtcd bench ttft --json` writes ({type(error).__name__}: {error})"
        raise ConfigError(path, "", why) from None
    return Speeds(prefill, reuse)


def _points(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return (tokens, seconds) by source."""
    points: dict[str, list[tuple[int, float]]] = {RECOMPUTE: []}
    for row in rows:
        tokens, source = int(row["tokens"]), str(row["source"])
        seconds = row["prefill_s"] if source == RECOMPUTE else row["fetch_decode_s"]
        points.setdefault(source, []).append((tokens, float(seconds)))
    return points


def _fitted(points: Sequence[tuple[int, float]], powers: tuple[int, int]) -> Cost:
    """Fit two powers of the number of tokens by least squares of relative errors, neither below zero.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("rows of a source are missing")
    # Each equation is divided by its seconds: 10 % at 512 tokens counts as much as 10 % at 8,192.
    rows = [[tokens**power / seconds for power in powers] for tokens, seconds in points]
    either = [_least([[row[one]] for row in rows]) for one in (0, 1)]
    tried = [(either[0][0], 0.0), (0.0, either[1][0])]
    if len(points) > 1:
        first, second = _least(rows)
        tried += [(first, second)] if min(first, second) >= 0 else []
    best = min(tried, key=lambda pair: sum((row[0] * pair[0] + row[1] * pair[1] - 1) ** 2 for row in rows))
    return Cost(**{_NAMES[power]: value for power, value in zip(powers, best, strict=True)})


def _least(rows: Sequence[Sequence[float]]) -> list[float]:
    """Solve ``rows x = 1`` by least squares."""
    return [float(value) for value in np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]]
