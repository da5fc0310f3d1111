"""Readers of files that people write: anything in one is a value of its kind, or an error that says where."""

from __future__ import annotations

import json
import math
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.memory import bounded_memory
from support.mutations import VALUES, changed, damaged, toml_file

from kvtcd import config
from kvtcd.core.access import Token
from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import Policy
from kvtcd.lab.recording import read_requests
from kvtcd.lab.trace import Request

ROOT = Path(__file__).parents[1]
TOKENS = b"""[[token]]
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
tenant = "uid:1000"
scopes = ["data", "metrics"]

[[token]]
sha256 = "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"
tenant = "team-a"
"""
DEEP = 100_000
PLACE = re.compile(
    r"line \d|position \d|end of document|holds no requests|nested too deeply|thousands of digits"
)
"""Where in a file, if no field or line is to blame; or that it is all of it."""


def right_config(found: config.Config) -> None:
    assert config.Config.model_validate(found) is found
    assert found.daemon.state.is_absolute()
    with tempfile.TemporaryDirectory() as folder:
        dumped = Path(folder) / "dumped.toml"
        dumped.write_text(config.dump(found))
        assert config.load(dumped).model_dump() == found.model_dump()


def right_policy(found: Policy) -> None:
    assert isinstance(found, Policy)
    assert 0 < found.host.low <= found.host.high <= 1
    hash(found)


def right_tokens(found: tuple[Token, ...]) -> None:
    assert found
    assert all(len(token.digest) == 32 and token.caller.scopes for token in found)


def right_requests(found: list[Request]) -> None:
    assert found
    times = [request.at for request in found]
    assert times == sorted(times)
    for request in found:
        assert math.isfinite(request.at)
        assert request.at >= 0
        assert request.tokens >= 1
        assert request.block_tokens >= 1
        assert request.blocks
        assert all(len(key) == 32 for key in request.blocks)
        assert request.token_bytes is None or request.token_bytes >= 1


@dataclass(frozen=True)
class Reader:
    """How a kind of file is read, files that are right, and what must hold of what is read."""

    read: Callable[[Path], Any]
    right: Callable[[Any], None]
    files: tuple[bytes, ...]


def written(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def of(*paths: str) -> tuple[bytes, ...]:
    return tuple((ROOT / path).read_bytes() for path in paths)


A, B = "0a" * 32, "0b" * 32
RECORDING = (
    {"kvtcd_recording": 1, "time": 100.5},
    {"namespace": 1, "block_tokens": 16, "token_bytes": 8},
    {"t": 101.5, "op": "match", "namespace": 1, "keys": [A, B]},
    {"t": 102, "op": "get", "namespace": 1, "keys": [A]},
    {"op": "gap", "lines": 3},
    {"t": 103, "op": "put", "namespace": 1, "keys": [B], "parent": A, "tokens": 16, "bytes": 128},
)
TRACE = tuple(json.loads(line) for line in of("tests/data/mooncake-600.jsonl")[0].splitlines()[:5])

READERS = {
    "config": Reader(config.load, right_config, of("config.example.toml", ".ci/serve.toml")),
    "policy": Reader(
        config.load_policy,
        right_policy,
        of("policies/balanced.toml", "policies/latency.toml", "policies/capacity.toml"),
    ),
    "tokens": Reader(config.load_tokens, right_tokens, (TOKENS,)),
    "trace": Reader(read_requests, right_requests, (written(*TRACE),)),
    "recording": Reader(read_requests, right_requests, (written(*RECORDING),)),
}
TOML = ("config", "policy", "tokens")
ROWS = {"trace": TRACE, "recording": RECORDING}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "file.toml"


@pytest.fixture(scope="module", autouse=True)
def _nothing_takes_memory_that_a_file_claims() -> Iterator[None]:
    with bounded_memory():
        yield


def check(reader: Reader, path: Path, data: bytes) -> bool:
    """Read a file, and hold what comes of it against what was promised; tell whether it was taken."""
    path.write_bytes(data)
    try:
        found = reader.read(path)
    except ConfigError as refused:
        error = refused
    else:
        reader.right(found)
        return True
    assert error.path == str(path)
    assert error.field or PLACE.search(error.why), error
    assert len(str(error)) < 500 + 4 * len(data)
    return False


@pytest.mark.parametrize("name", READERS)
def test_files_that_are_right_are_read(name: str, path: Path) -> None:
    assert all(check(READERS[name], path, data) for data in READERS[name].files)


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\xff\xfe")
@example(data=b"a = " + b"[" * DEEP)
@example(data=b"a = " + b"{a=" * DEEP)
@example(data=b"[" + b"a." * 2000 + b"a]")
@example(data=b"a = " + b"9" * 5000)
@example(data=b"[host]\ncapacity = 0x" + b"f" * 9000)
@example(data=b"[daemon]\nstop_seconds = 0x" + b"f" * 9000)
@example(data=b"[limits]\nconnections = -0x1")
@example(data=b'[codec]\nprofiles = "\\u0000"')
@example(data=b'[daemon]\nstate = "~nobody-at-all/x"')
@example(data=b'[tcp]\nkey = "~nobody-at-all/x"\ncertificate = "x"')
@example(data=b'[codec]\nprofiles = "\\u001f\\u007f\\u0085\\\\\\""')
@example(data=b'[host]\ncapacity = "' + b"9" * 400 + b' TiB"')
@example(data=b"[" * DEEP)
@example(data=b'{"a":' * DEEP)
@example(data=b"9" * 5000)
@example(data=b'{"timestamp": NaN, "input_length": 1, "hash_ids": [1]}')
@example(data=b'{"timestamp": true, "input_length": true, "hash_ids": [true]}')
@example(data=b'{"timestamp": 1, "input_length": 1, "input_length": 2, "hash_ids": [1]}')
@example(data=written(RECORDING[0]) + b"[" * DEEP + b"\n{}\n")
def test_any_bytes_are_read_or_refused(name: str, path: Path, data: bytes) -> None:
    check(READERS[name], path, data)


@pytest.mark.parametrize("name", READERS)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(name: str, path: Path, data: st.DataObject) -> None:
    check(READERS[name], path, data.draw(damaged(READERS[name].files)))


@pytest.mark.parametrize("name", TOML)
@given(st.data())
def test_a_file_that_says_something_else_is_read_or_refused(name, path, data) -> None:
    original = tomllib.loads(data.draw(st.sampled_from(READERS[name].files)).decode())
    tables = data.draw(changed(original))
    for _ in range(data.draw(st.integers(0, 2))):
        tables = data.draw(changed(tables))
    check(READERS[name], path, toml_file(tables if isinstance(tables, dict) else {"a": tables}))


@pytest.mark.parametrize("name", ROWS)
@given(st.data())
def test_a_line_that_says_something_else_is_read_or_refused(name, path, data) -> None:
    rows: list[Any] = [*ROWS[name]]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(rows) - 1))
        rows[at] = data.draw(changed(rows[at]))
    check(READERS[name], path, written(*rows))


@settings(max_examples=20)
@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), st.sampled_from(sorted(READERS)))
def test_any_values_are_read_or_refused(path, body, name) -> None:
    check(READERS[name], path, toml_file(body) if name in TOML else written(body))


@pytest.mark.parametrize("name", TOML)
def test_a_file_that_is_far_too_large_is_not_read(name: str, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"file.toml: has more than 4 MiB"):
        READERS[name].read(path)
