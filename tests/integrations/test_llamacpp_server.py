"""Slots of llama.cpp's own server through a real daemon: what was read once is not read again."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from support.llama_server import complete, llama_server
from support.prefixes import lossless_daemon
from support.tiny_gguf import write_tiny_gguf

from kvtcd.core.errors import BadMagic, BadRequest, ServerError, Unavailable
from kvtcd.core.keys import token_array
from kvtcd.integrations import llamacpp_server
from kvtcd.integrations.llamacpp_blocks import prefix_keys
from kvtcd.integrations.llamacpp_file import read
from kvtcd.integrations.llamacpp_server import LlamaServer
from kvtcd.integrations.llamacpp_slots import Model, Slots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtcd.client import BlockMatch, Client
    from kvtcd.lab.daemon import Daemon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp has no wheel for this machine"),
]
PROMPT = "The lighthouse keeper wrote down the weather every evening, and nothing else. " * 6
NEXT = "On Sundays he"
QUANTIZED = {"cache_type_k": "GGML_TYPE_Q8_0", "cache_type_v": "GGML_TYPE_Q8_0"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with lossless_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "slots").mkdir()
    return tmp_path / "slots"


@contextmanager
def slots(client: Client, model: Path, folder: Path, salt: str, variant: str = "", **settings: object):
    """A new server with empty slots: its address, itself, and its slots in the daemon."""
    with llama_server(model, folder, **settings) as url:
        server = LlamaServer(url, folder)
        yield url, server, Slots(client, server, Model(file=model, variant=variant), salt=salt)


def test_a_slot_outlives_server_and_daemon_and_says_the_same(daemon, client, model, folder):
    with slots(client, model, folder, "outlives") as (url, server, store):
        first = complete(url, PROMPT, 8)
        read = server.tokenize(PROMPT) + first["tokens"]
        saved = store.save(0)
        assert (saved.tokens, saved.new, saved.why) == (len(read) - 1, True, None)
        assert store.save(0).new is False, "it is there already"
        own = complete(url, [*read, *server.tokenize(NEXT)[1:]], 8)
    daemon.stop()
    daemon.start()
    with slots(client, model, folder, "outlives") as (url, server, store):
        asked = [*read, *server.tokenize(NEXT)[1:]]
        restored = store.restore(0, asked)
        assert (restored.tokens, restored.nbytes) == (saved.tokens, saved.nbytes)
        went_on = complete(url, asked, 8)
    assert went_on["tokens"] == own["tokens"]
    assert went_on["timings"]["cache_n"] == saved.tokens
    assert not list(folder.iterdir()), "no slot file stays behind"


@pytest.mark.parametrize(
    ("settings", "rotations"),
    [({}, ""), ({"cache_type_k": "GGML_TYPE_Q8_0"}, " r=64+0"), (QUANTIZED, " r=64+64")],
)
def test_quantized_keys_and_values_of_heads_that_are_rotated_are_restored(
    client, folder, tmp_path, settings, rotations
):
    model = write_tiny_gguf(tmp_path / "wide.gguf", head=64)
    with slots(client, model, folder, "rotated", **settings) as (url, server, store):
        prompt = server.tokenize(PROMPT)
        complete(url, prompt, 0)
        assert store.save(0).tokens == len(prompt)
        with server.saved(0) as path:
            assert f"rows{rotations} k=" in str(read(memoryview(path.read_bytes())).form)
        asked = [*prompt, *server.tokenize(NEXT)[1:]]
        own = complete(url, asked, 8)
    with slots(client, model, folder, "rotated", **settings) as (url, _, store):
        assert store.restore(0, asked).tokens == len(prompt)
        went_on = complete(url, asked, 8)
    assert went_on["tokens"] == own["tokens"]
    assert went_on["timings"]["cache_n"] == len(prompt)


def test_the_longest_saved_prefix_is_restored_and_without_one_the_slot_stays(client, model, folder):
    with slots(client, model, folder, "longest", n_parallel=2) as (url, server, store):
        prompt = server.tokenize(PROMPT)
        for length in (100, 300, 200):
            complete(url, prompt[:length], 0, slot=0)
            assert store.save(0).tokens == length
        assert [store.restore(1, prompt[:n]).tokens for n in (99, 100, 250, 299, 400)] == [
            0,
            100,
            200,
            200,
            300,
        ]
        assert complete(url, prompt[:301], 0, slot=1)["timings"]["cache_n"] == 300
        other = [5, 6, *prompt]
        assert store.restore(1, other).tokens == store.restore(1, []).tokens == 0
        assert complete(url, prompt[:302], 0, slot=1)["timings"]["cache_n"] == 301, "the slot has what it had"


def test_a_file_that_is_not_whole_any_more_is_as_if_it_were_not_there(client, model, folder):
    with slots(client, model, folder, "whole") as (url, server, store):
        prompt = server.tokenize(PROMPT)
        saved = []
        for length in (100, 300):
            complete(url, prompt[:length], 0)
            before = {match.key for match in _stored(client, store, prompt)}
            store.save(0)
            saved.append({match.key for match in _stored(client, store, prompt)} - before)
        (head,) = saved[1]
        (name,) = {n.name for n in client.namespaces() if _is_there(client, n.name, head)}
        client.delete(name, store._whole(name, head).keys()[0], salt="whole")
        assert store.restore(0, prompt).tokens == 100
        complete(url, prompt[:300], 0)
        assert store.save(0).new, "it is stored anew"
        assert store.restore(0, prompt).tokens == 300


def _stored(client: Client, store: Slots, prompt: list[int]) -> list[BlockMatch]:
    """Heads of beginnings of a prompt that are there."""
    found: list[BlockMatch] = []
    for namespace in client.namespaces():
        keys = list(prefix_keys(namespace.digest, token_array(prompt)))
        found += [
            match for match in client.match(namespace.name, keys, salt=store._salt).blocks if match.tier
        ]
    return found


def _is_there(client: Client, name: str, key: bytes) -> bool:
    return client.match(name, [key], salt="whole").blocks[0].tier is not None


def test_caches_that_are_not_interchangeable_never_meet(client, model, folder, tmp_path):
    other = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    with slots(client, model, folder, "meet") as (url, server, store):
        prompt = server.tokenize(PROMPT)
        complete(url, prompt[:200], 0)
        assert store.save(0).new
    worlds = [
        (other, "", {}),
        (model, "--rope-freq-scale 0.5", {}),
        (model, "", {"n_ctx": 1024}),
        (model, "", {"cache_type_k": "GGML_TYPE_Q8_0"}),
        (model, "", {"flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_DISABLED"}),
        (model, "", {"n_parallel": 2, "n_ctx": 4096}),
    ]
    for file, variant, settings in worlds:
        with slots(client, file, folder, "meet", variant, **settings) as (url, _, store):
            assert store.restore(0, prompt).tokens == 0, (file, variant, settings)
            complete(url, prompt[:200], 0)
            assert store.save(0).new
            assert store.restore(0, prompt).tokens == 200, "the same one twice is a hit"
    with slots(client, model, folder, "meet") as (_, server, store):
        assert Slots(client, server, Model(file=model), salt="bob").restore(0, prompt).tokens == 0
        assert store.restore(0, prompt).tokens == 200


def test_what_is_wrong_is_said(client, model, folder, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with slots(client, model, folder, "wrong") as (url, server, store):
        assert store.save(0).why == "the slot is empty"
        complete(url, PROMPT, 0)
        with pytest.raises(Unavailable, match=r"not in .*elsewhere; give its --slot-save-path$"):
            Slots(client, LlamaServer(url, elsewhere), Model(file=model)).save(0)
        assert not list(folder.iterdir()), "nothing is left where the server has saved it"
        with monkeypatch.context() as blind:
            blind.setattr(llamacpp_server, "_FOLDER_OPTION", b"--of-no-process")
            with pytest.raises(Unavailable, match=r"and remove kvtcd-.*\.bin there") as unseen:
                Slots(client, LlamaServer(url, elsewhere), Model(file=model)).save(0)
        (left,) = folder.iterdir()
        assert left.name in str(unseen.value)
        left.unlink()
        for ask in (lambda: store.save(1), lambda: store.restore(9, [1, 2])):
            with pytest.raises(BadRequest, match=r"slot: . is none of the server's, which are 0 to 0"):
                ask()
        foreign = tmp_path / "model.safetensors"
        foreign.write_bytes(bytes(64))
        for wrong in (Model(file=foreign), Model(file=model, adapters=(foreign,))):
            with pytest.raises(BadMagic, match=r"model\.safetensors: is no GGUF file"):
                Slots(client, server, wrong)
        with pytest.raises(Unavailable, match="is no file"):
            Slots(client, server, Model(file=tmp_path / "no.gguf"))
        with server.file() as path:
            path.write_bytes(b"no slot file")
            with pytest.raises(ServerError, match="Unable to restore"):
                server.restore(0, path)
    with pytest.raises(Unavailable, match=r"no llama\.cpp server answers"):
        LlamaServer(url, folder).props()
    with pytest.raises(BadRequest, match="http://host:port"):
        LlamaServer("localhost:8080", folder)
    with pytest.raises(BadRequest, match="slot-save-path"):
        LlamaServer(url, tmp_path / "none")


def test_the_command_saves_and_restores(daemon, model, folder, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT + NEXT)
    (tmp_path / "messages.json").write_text(json.dumps([{"role": "user", "content": PROMPT}]))

    def run(verb: str, url: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        told = ["--server", url, "--slots", str(folder), "--daemon", str(daemon.socket), *map(str, arguments)]
        command = [sys.executable, "-m", "kvtcd", "llamacpp", verb, *told]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with llama_server(model, folder) as url:
        empty = run("save", url)
        assert (empty.returncode, empty.stderr) == (1, "nothing was saved: the slot is empty\n")
        count = complete(url, PROMPT, 0)["tokens_evaluated"]
        assert run("save", url).stdout.startswith(f"{count} tokens, ")
    with llama_server(model, folder) as url:
        restored = run("restore", url, "--prompt", tmp_path / "prompt.txt")
        assert restored.stdout.startswith(f"{count} of "), restored.stderr
        chat = run("restore", url, "--messages", tmp_path / "messages.json")
        assert chat.stderr.startswith("nothing is saved that begins this prompt of "), chat.stderr
        assert (chat.returncode, chat.stdout) == (1, "")
        assert run("restore", url).returncode == 2
