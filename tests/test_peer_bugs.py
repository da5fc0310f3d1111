"""Bugs that caches of this kind had again and again, where one of them could reach a daemon.

`tests/README.md` has all of them, and names the tests that are elsewhere. Here is what a client sees of a
daemon that is a real process.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.patience import PATIENCE_S

from kvtcd.client import BlockHead, Client
from kvtcd.core.errors import BlockMismatch, IdentityConflict, NotFound
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
TOKENS = 16
LOSSLESS = '[match]\n[codec]\nname = "lossless"\n'


def layout(*streams: tuple[str, int, int], layers: int = 2, dtype: Dtype = Dtype.BF16) -> Layout:
    return Layout(tuple(Stream(*stream, rope=False) for stream in streams), layers, dtype)


IDENTITY = Identity(
    engine="test", hash_scheme="test", model="m", weights="ab" * 32, rope=None,
    layout=layout(("k", 2, 64), ("v", 2, 64)), block_tokens=TOKENS,
)  # fmt: skip
NBYTES = IDENTITY.layout.nbytes(TOKENS)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)


def new_daemon(
    folder: Path, *, host: int = 64 << 20, disk: int = 128 << 20, policy: str = LOSSLESS
) -> Daemon:
    folder.mkdir(exist_ok=True)
    (folder / "policy.toml").write_text(policy)
    return Daemon(folder, host=host, disk=disk, profiles=folder / "profiles", policy=folder / "policy.toml")


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with new_daemon(folder / "d") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


@pytest.fixture
def space(client: Client, request: pytest.FixtureRequest) -> str:
    """A namespace that no other test uses."""
    weights = request.node.name.encode().hex()[-64:].rjust(64, "0")
    name = re.sub(r"[^a-z0-9]", "-", request.node.name)[-40:].strip("-")
    return client.register(name, replace(IDENTITY, weights=weights)).name


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data(seed: int, nbytes: int = NBYTES) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def put(client: Client, space: str, number: int, raw: bytes | None = None, **options: Any) -> str:
    head = BlockHead(key(number), TOKENS, first_token=0)
    return client.put(space, head, data(number) if raw is None else raw, **options).outcome


def test_keys_that_agree_in_a_piece_of_them_are_different_blocks(client: Client, space: str) -> None:
    """Cut hashes: two images whose hashes were cut to 16 bits shared an entry (LMCache #4086)."""
    whole = bytes(range(32))
    others = [whole[:31] + b"\xff", b"\xff" + whole[1:], whole[:2], whole[:31], whole + b"\x00"]
    client.put(space, BlockHead(whole, TOKENS, first_token=0), data(1))
    assert not any(block.tier for block in client.match(space, others).blocks)
    for number, other in enumerate(others):
        client.put(space, BlockHead(other, TOKENS, first_token=0), data(10 + number))
    assert bytes(client.get(space, whole)) == data(1)
    assert [bytes(client.get(space, other)) for other in others] == [data(10 + i) for i in range(len(others))]


def test_a_token_that_differs_ends_the_match_before_its_block(client: Client, space: str) -> None:
    """A match that is believed without comparing tokens (openvino.genai #3722)."""
    from kvtcd.core.keys import chain  # noqa: PLC0415 - used here alone

    words = list(range(100, 100 + 4 * TOKENS))
    blocks = list(chain(client.namespace(space).digest, words, TOKENS))
    heads = [BlockHead(block.key, block.tokens, block.first, block.parent) for block in blocks]
    client.put_many(space, [(head, data(i)) for i, head in enumerate(heads)])
    assert client.match_tokens(space, words).prefix_tokens == len(words)
    for place in range(len(words)):
        changed = [*words[:place], words[place] + 1, *words[place + 1 :]]
        assert client.match_tokens(space, changed).prefix_tokens == place // TOKENS * TOKENS
    for size in (1, 255, 256, 1 << 31):  # nor are two tokens one, written after each other
        assert client.match_tokens(space, [size, *words]).prefix_tokens == 0


def test_a_gap_ends_the_prefix(client: Client, space: str) -> None:
    """Hits behind a gap were given to a request as if they were a prefix (Mooncake #4153)."""
    for number in (1, 2, 4, 5):
        put(client, space, number)
    found = client.match(space, [key(number) for number in (1, 2, 3, 4, 5)])
    assert [block.key for block in found.prefix] == [key(1), key(2)]
    assert found.prefix_tokens == 2 * TOKENS
    assert [block.tier is not None for block in found.blocks] == [True, True, False, True, True]


@pytest.mark.parametrize(
    "change",
    [
        {"scales": "int4-group32"},
        {"layout": layout(("k", 2, 64), ("v", 2, 64), dtype=Dtype.F16)},
        {"layout": layout(("k", 1, 128), ("v", 1, 128))},
        {"layout": layout(("k", 2, 64), ("v", 2, 64), ("scale", 2, 1))},
        {"page_format": "other"},
        {"parallel": "tp2-rank0"},
        {"adapter": "cd" * 32},
    ],
    ids="-".join,
)
def test_caches_that_are_encoded_otherwise_never_meet(
    client: Client, space: str, change: dict[str, Any]
) -> None:
    """Bit width, scales or shape changed for one model path, and old blocks were taken (omlx #2045)."""
    put(client, space, 1)
    other = replace(client.namespace(space).identity, **change)
    with pytest.raises(IdentityConflict):
        client.register(space, other)  # one name is never two caches
    second = client.register(f"{space}-2", other).name
    assert not client.match(second, [key(1)]).prefix
    with pytest.raises(NotFound):
        client.get(second, key(1))


def test_scales_that_are_missing_are_seen(client: Client, space: str) -> None:
    """Quantised caches were stored without their scales (imp #1189): a block is whole or is refused."""
    scaled = replace(
        client.namespace(space).identity,
        layout=layout(("k", 2, 64), ("v", 2, 64), ("scale", 2, 1)), scales="int8-per-head",
    )  # fmt: skip
    name = client.register(f"{space}-s", scaled).name
    nbytes = scaled.layout.nbytes(TOKENS)
    assert nbytes > NBYTES
    with pytest.raises(BlockMismatch):
        client.put(name, BlockHead(key(1), TOKENS, first_token=0), data(1))
    client.put(name, BlockHead(key(1), TOKENS, first_token=0), data(1, nbytes), durable=True)
    client.demote(name, [key(1)])
    assert bytes(client.get(name, key(1))) == data(1, nbytes)


def test_names_do_not_depend_on_the_interpreter_that_made_them() -> None:
    """Python's own hash in keys: no hits in another process, or ranks that disagree (LMCache #1139)."""
    code = (
        "from test_peer_bugs import IDENTITY; from kvtcd.core.keys import chain; "
        "print(IDENTITY.digest.hex(), [b.key.hex() for b in chain(IDENTITY.digest, range(99), 16)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert len(said) == 1


def test_two_writers_of_one_block_leave_one_of_them_whole(daemon: Daemon, client: Client, space: str) -> None:
    """Two stores of one key raced, and a mixture was read (LMCache #4991)."""
    versions = [bytes([number]) * NBYTES for number in range(1, 5)]
    for number in range(20):

        def write(raw: bytes, number: int = number) -> None:
            with daemon.client() as own:
                put(own, space, number, raw)

        threads = [threading.Thread(target=write, args=(raw,)) for raw in versions]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if client.match(space, [key(number)]).prefix:
                assert bytes(client.get(space, key(number))) in versions
        for thread in threads:
            thread.join()
        assert bytes(client.get(space, key(number))) in versions


def test_a_store_that_breaks_off_leaves_nothing(daemon: Daemon, client: Client, space: str) -> None:
    """A writer died, and what it had written so far was there under the final name (LMCache #4991)."""
    path = f"/v1/namespaces/{space}/blocks/{key(1).hex()}?tokens={TOKENS}&first_token=0"
    head = (
        f"PUT {path} HTTP/1.1\r\nHost: kvtcd\r\nContent-Type: application/octet-stream\r\n"
        f"Content-Length: {NBYTES}\r\n\r\n"
    )
    for sent in (0, 1, NBYTES - 1):
        with socket.socket(socket.AF_UNIX) as broken:
            broken.connect(str(daemon.socket))
            broken.sendall(head.encode() + data(1)[:sent])
        assert not client.match(space, [key(1)]).prefix
    until = time.monotonic() + PATIENCE_S
    while put(client, space, 1) == "dropped":  # as long as the daemon has not seen the writer's end
        assert time.monotonic() < until
        time.sleep(0.05)
    assert bytes(client.get(space, key(1))) == data(1)


@pytest.mark.parametrize("shared", [False, True], ids=["http", "region"])
def test_what_is_stored_does_not_change_with_the_memory_it_came_from(
    client: Client, space: str, *, shared: bool
) -> None:
    """A block was used again for other tokens while its copy was still going on (vLLM #45704)."""
    with client.region(NBYTES) as region:
        assert region.path == "region"
        memory = region.memory if shared else memoryview(bytearray(NBYTES))
        for number in range(30):
            memory[:] = data(number)
            put(client, space, number, memory)
            memory[:] = bytes(NBYTES)  # at once: an answer means that nobody looks here any more
        client.flush(space)
        assert [bytes(client.get(space, key(n))) for n in range(30)] == [data(n) for n in range(30)]


def test_what_was_removed_can_be_stored_again(client: Client, space: str) -> None:
    """What was left of removed entries made the cache refuse new ones (Mooncake #3709)."""
    for _ in range(3):
        assert put(client, space, 1, durable=True) == "stored"
        assert client.delete(space, key(1))
        assert not client.match(space, [key(1)]).prefix
        assert put(client, space, 1, durable=True) == "stored"
        identity = client.namespace(space).identity
        assert client.purge(space).removed == 1
        client.register(space, identity)
        assert not client.match(space, [key(1)]).prefix


PAGE = 4096
BIG = 4096
"""Tokens of a block of 4 MiB."""


def fill(client: Client, space: str, first: int, count: int) -> set[str]:
    nbytes = IDENTITY.layout.nbytes(BIG)
    return {
        client.put(space, BlockHead(key(n), BIG, first_token=0), data(n, nbytes)).outcome
        for n in range(first, first + count)
    }


@pytest.mark.slow
def test_more_than_there_is_room_for_is_no_error_and_counts_on_after_a_restart(folder: Path) -> None:
    """Full tiers raised (LMCache #1330), eviction met what was gone (#1981), usage began at 0 (#4564)."""
    host, disk = 32 << 20, 64 << 20
    owner = new_daemon(folder / "full", host=host, disk=disk)
    identity = replace(IDENTITY, block_tokens=BIG)

    def settled(client: Client) -> int:
        """Check that what is said to be there is there; return the bytes on disk."""
        client.flush("n")
        tiers = client.stats()["tiers"]
        there = [block.key for block in client.match("n", [key(n) for n in range(80)]).blocks if block.tier]
        for one in there:
            assert bytes(client.get("n", one)) == data(
                int.from_bytes(one, "big"), identity.layout.nbytes(BIG)
            )
        assert len(there) >= 10
        used = int(tiers["disk"]["used"])
        assert 0 < used <= disk
        return used

    with owner, owner.client() as client:
        client.register("n", identity)
        assert fill(client, "n", 0, 40) <= {"stored", "dropped"}
        before = settled(client)
    with owner, owner.client() as client:
        assert int(client.stats()["tiers"]["disk"]["used"]) >= before // 2
        assert fill(client, "n", 40, 40) <= {"stored", "dropped"}
        settled(client)


@pytest.mark.slow
def test_a_killed_daemon_leaves_nothing_in_the_way_of_the_next(folder: Path) -> None:
    """Shared memory outlived its process, and the next one could not start (vLLM #51579)."""
    owner = new_daemon(folder / "killed")
    with owner, owner.client() as client, client.region(NBYTES) as region:
        client.register("n", IDENTITY)
        region.memory[:] = data(1)
        put(client, "n", 1, region.memory, durable=True)
        for _ in range(3):
            owner.kill()
            owner.start()
            region.memory[:] = bytes(NBYTES)
            got = client.get("n", key(1), out=region.memory)  # a region of a daemon that is no more
            assert bytes(got) == data(1)
        client.get("n", key(1), out=region.memory)
        assert region.path == "region"
    assert not list(Path("/dev/shm").glob("*kvtcd*"))  # noqa: S108 - where shared memory lies that has a name


def test_a_client_that_was_idle_over_a_restart_is_served(folder: Path) -> None:
    """The server was started anew, and its clients never came back (LMCache #4642)."""
    owner = new_daemon(folder / "idle")
    with owner, owner.client() as client:
        client.register("n", IDENTITY)
        put(client, "n", 1, durable=True)
        boot = client.info().boot_id
        owner.stop()
        owner.start()
        assert bytes(client.get("n", key(1))) == data(1)
        assert put(client, "n", 2) == "stored"
        assert client.info().boot_id != boot


@pytest.mark.parametrize(
    "streams",
    [
        [("latent", 1, 512), ("k_pe", 1, 64)],
        [("k", 1, 192), ("v", 1, 128)],
        [("k", 3, 5), ("v", 7, 1), ("x", 1, 1)],
    ],
    ids=["mla", "wider-keys", "odd"],
)
def test_heads_of_any_shape_come_back(
    client: Client, space: str, streams: list[tuple[str, int, int]]
) -> None:
    """MLA, or keys wider than values: a shape that the coder took for granted (LMCache #2774)."""
    shape = layout(*streams, layers=3)
    name = client.register(f"{space}-x", replace(client.namespace(space).identity, layout=shape)).name
    for tokens in (TOKENS, 1, TOKENS - 1):
        raw = data(tokens, shape.nbytes(tokens))
        client.put(name, BlockHead(key(tokens), tokens, first_token=0), raw, durable=True)
        client.demote(name, [key(tokens)])
        assert bytes(client.get(name, key(tokens))) == raw


def test_what_cannot_be_packed_takes_little_more_than_it_is(folder: Path) -> None:
    """Small or packed blocks grew in the coder (FlexKV): random bytes cost their length and two pages."""
    owner = new_daemon(folder / "random")
    with owner, owner.client() as client:
        client.register("n", IDENTITY)
        for number in range(50):
            put(client, "n", number, durable=True)
        packed = client.stats()["tiers"]["disk"]["packed"]
        assert packed["blocks"] == 50
        assert packed["bytes"] <= 50 * (NBYTES + 2 * PAGE)
        client.demote("n", [key(n) for n in range(50)])
        assert [bytes(client.get("n", key(n))) for n in range(50)] == [data(n) for n in range(50)]


@pytest.mark.slow
def test_what_was_kept_exactly_is_read_after_the_codec_changed(folder: Path) -> None:
    """A part was left uncompressed on purpose, and its reader expected it compressed (omlx #1822)."""
    owner = new_daemon(folder / "codec")
    with owner, owner.client() as client:
        client.register("n", IDENTITY)
        put(client, "n", 1, durable=True)
    (folder / "codec" / "policy.toml").write_text('[match]\n[codec]\nname = "fp8"\n')
    with owner, owner.client() as client:
        assert client.namespace("n").codec != "lossless"
        raw = memoryview(bytearray(b"\x80\x3f" * (NBYTES // 2)))  # ones, which fp8 has
        put(client, "n", 2, raw, durable=True)
        client.demote("n", [key(1), key(2)])
        assert bytes(client.get("n", key(1))) == data(1)
        assert bytes(client.get("n", key(2))) == bytes(raw)
    (folder / "codec" / "policy.toml").write_text(LOSSLESS)
    with owner, owner.client() as client:
        assert bytes(client.get("n", key(2))) == bytes(raw)


def test_the_table_names_tests_that_there_are() -> None:
    named = re.findall(
        r"`((?:[a-z_]+/)*test_[a-z0-9_]+\.py)::(test_[a-z0-9_]+)`", (HERE / "README.md").read_text()
    )
    assert len(named) >= 40
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (HERE / file).is_file() or f"def {test}(" not in (HERE / file).read_text()
    ]
    assert missing == []
