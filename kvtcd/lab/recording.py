"""What `kvtcd serve --record` wrote, as requests: match, get and put of one request are put together.

A *reference* is a block that a get asked for, or a put offered; within one request a block is one
reference, however often it is named. A match refers to nothing, since schedulers repeat it: it says which
blocks make up a prompt, and in what order. Within a namespace, line by line:

1. A match opens a request. If it names the same blocks as the match before it, and nothing was referred to
   since, it is a repetition.
2. A get belongs to the latest request whose match names its first block and that has not referred to it yet;
   else it is a request of its own. All blocks of one get belong together.
3. A put belongs to the latest request whose match names its block and that has not referred to it yet, if
   it refers to the block's parent, or there is none; else to the request whose last block is the parent (so
   an answer that is saved continues its prompt); else again to the one whose match names it; else to the one
   that asked for the block in vain; else it is a request of its own. No request puts a block twice.
4. Nothing joins a request 10 minutes after its last line. One that refers to nothing is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtcd.core.errors import BadRequest, ConfigError, Corrupt
from kvtcd.core.fields import Fields, json_object, string
from kvtcd.core.identity import MAX_BLOCK_TOKENS
from kvtcd.core.keys import RecordKey
from kvtcd.lab.trace import Request, read_trace

MARK = "kvtcd_recording"
VERSION = 1
OPEN_S = 600.0
_MOST = 1 << 53
_OPS = ("match", "get", "put", "gap")
_KEY = re.compile("[0-9a-f]{64}")


def read_requests(path: Path) -> list[Request]:
    """Read a trace: a recording, or what the Mooncake project publishes.

    Raises:
        ConfigError: it cannot be read, holds no requests, or a line is wrong.
    """
    try:
        with path.open("rb") as lines:
            if MARK.encode() not in next(lines, b""):
                return read_trace(path)
            lines.seek(0)
            requests = list(_requests(path, lines))
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {os.strerror(error.errno or 0)}") from None
    if not requests:
        raise ConfigError(path, "", "holds no requests")
    return requests


@dataclass(slots=True, eq=False)
class _Group:
    """One request: its references in `blocks`, each with its tokens, `last` the one that was made last."""

    touched: float
    block_tokens: int
    token_bytes: int
    named: tuple[RecordKey, ...] = ()
    blocks: dict[RecordKey, int] = field(default_factory=dict)
    got: set[RecordKey] = field(default_factory=set)
    put: set[RecordKey] = field(default_factory=set)
    last: RecordKey | None = None
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.touched

    def request(self, start: float) -> Request:
        """Return it as it is replayed: in the order of its match, and then as it went on."""
        place = {key: number for number, key in enumerate(self.named)}
        blocks = sorted(self.blocks, key=lambda key: place.get(key, len(place)))
        tokens = sum(self.blocks.values())
        return Request(round(self.at - start, 3), tokens, tuple(blocks), self.block_tokens, self.token_bytes)


class _Space:
    """One namespace: which requests name a block that they have not referred to, and which did so last."""

    def __init__(self, block_tokens: int, token_bytes: int) -> None:
        self._block_tokens, self._token_bytes = block_tokens, token_bytes
        self._naming: dict[RecordKey, list[_Group]] = {}
        self._holding: dict[RecordKey, _Group] = {}
        self._latest: _Group | None = None
        self.groups: list[_Group] = []

    def match(self, keys: Sequence[RecordKey], now: float) -> None:
        latest = self._latest
        if latest and not latest.blocks and latest.named == tuple(keys):
            latest.touched = now
            return
        self._latest = self._open(now, keys)

    def get(self, keys: Sequence[RecordKey], now: float) -> None:
        group = self._named(keys[0], now) or self._open(now)
        for key in keys:
            group.got.add(key)
            self._refer(group, key, self._block_tokens, now)

    def put(self, key: RecordKey, parent: RecordKey | None, tokens: int, now: float) -> None:
        naming = self._named(key, now)
        before = self._joinable(self._holding.get(parent), now) if parent else None
        asking = self._joinable(self._holding.get(key), now)
        candidates = (
            naming if naming and (parent is None or parent in naming.blocks) else None,
            before if before and before.last == parent else None,
            naming,
            asking if asking and key in asking.got else None,
        )
        group = next((g for g in candidates if g and key not in g.put), None) or self._open(now)
        group.put.add(key)
        self._refer(group, key, tokens, now)

    def _open(self, now: float, named: Sequence[RecordKey] = ()) -> _Group:
        group = _Group(now, self._block_tokens, self._token_bytes, tuple(named))
        self.groups.append(group)
        for key in named:
            self._naming.setdefault(key, []).append(group)
        return group

    def _named(self, key: RecordKey, now: float) -> _Group | None:
        """Return the latest request that names a block and has not referred to it."""
        groups = self._naming.get(key, [])
        if groups and self._joinable(groups[-1], now) is None:
            groups.clear()  # those before it are older still
        return groups[-1] if groups else None

    def _joinable(self, group: _Group | None, now: float) -> _Group | None:
        return group if group and now - group.touched <= OPEN_S else None

    def _refer(self, group: _Group, key: RecordKey, tokens: int, now: float) -> None:
        group.blocks[key] = tokens
        group.last, group.touched = key, now
        self._holding[key] = group
        if group in self._naming.get(key, ()):
            self._naming[key].remove(group)


def _requests(path: Path, lines: Iterable[bytes]) -> Iterator[Request]:
    spaces: dict[int, _Space] = {}
    all_spaces: list[_Space] = []
    now = 0.0
    for number, row in _rows(path, lines):
        try:
            if MARK in row:
                if (version := row.integer(MARK, 1, _MOST)) != VERSION:
                    raise BadRequest(MARK, f"is version {version}; this release reads {VERSION}")  # noqa: TRY301 - as the others
                spaces = {}
            elif "block_tokens" in row:
                space = _Space(
                    row.integer("block_tokens", 1, MAX_BLOCK_TOKENS), row.integer("token_bytes", 1, _MOST)
                )
                spaces[row.integer("namespace", 0, _MOST)] = space
                all_spaces.append(space)
            elif row.choice("op", _OPS) != "gap":
                now = max(now, row.number("t", 0, _MOST))  # clocks are set back
                if (of := row.integer("namespace", 0, _MOST)) not in spaces:
                    raise BadRequest("namespace", f"no line above describes {of}")  # noqa: TRY301 - as the others
                _take(spaces[of], row, now)
        except BadRequest as error:
            raise ConfigError(path, f"line {number}", str(error)) from None
    groups = [group for space in all_spaces for group in space.groups if group.blocks]
    groups.sort(key=lambda group: group.at)
    for group in groups:
        yield group.request(groups[0].at)


def _take(space: _Space, row: Fields, now: float) -> None:
    keys = [_key("keys", key) for key in row.items("keys")]
    match row.text("op"):
        case "match":
            space.match(keys, now)
        case "get":
            if keys:
                space.get(keys, now)
        case _:
            if len(keys) != 1:
                raise BadRequest("keys", f"a put has one, not {len(keys)}")
            parent = _key("parent", row.value("parent")) if "parent" in row else None
            space.put(keys[0], parent, row.integer("tokens", 1, MAX_BLOCK_TOKENS), now)


def _key(name: str, value: object) -> RecordKey:
    text = string(name, value)
    if not _KEY.fullmatch(text):
        raise BadRequest(name, f"{text[:80]!r} is not 64 hex digits")
    return RecordKey(bytes.fromhex(text))


def _rows(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Fields]]:
    """Yield the lines with their numbers, without those that a killed daemon broke off."""
    broken: int | None = None
    for number, line in enumerate(lines, start=1):
        try:
            row = Fields(json_object(line), MARK)
        except Corrupt:
            row = None
        if broken is not None and not (row and MARK in row):
            break
        broken = None if row else number
        if row:
            yield number, row
    else:
        return
    raise ConfigError(path, f"line {broken}", "is not a line of a recording")
