"""The main job on a real model, through the real daemon: what comes back, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from support.models import real_model

from kvtcd.integrations.transformers_blocks import raw_block
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.lab import models
from kvtcd.lab.capture import prefill
from kvtcd.lab.daemon import Daemon

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_a_lossless_cache_that_survived_a_restart_continues_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    loaded = real_model("smollm2")
    text = files("kvtcd.lab.texts").joinpath("reader.txt").read_text("utf-8")
    tokens = models.tokenize(loaded, text)[:700]
    cache = prefill(loaded, tokens[:-1])
    policy = tmp_path / "lossless.toml"
    policy.write_text('[codec]\nname = "lossless"\n')
    running = Daemon(tmp_path, host=64 << 20, disk=256 << 20, profiles=tmp_path / "profiles", policy=policy)
    with running, running.client() as client:
        prefixes = PrefixCache(client, loaded.model)
        saved = prefixes.save(cache, tokens, durable=True)
        client.demote(prefixes.namespace, [result.key for result in saved.results])
    with running, running.client() as client:
        prefixes = PrefixCache(client, loaded.model)
        known = prefixes.load(tokens)

    layout = prefixes.identity.layout
    assert known.tokens == 699
    assert torch.equal(raw_block(known.cache, 0, 699, layout), raw_block(cache, 0, 699, layout))
    ids = torch.tensor([tokens])
    went_on = loaded.model.generate(ids, cache=cache, max_new_tokens=32, do_sample=False)
    resumed = loaded.model.generate(ids, cache=known.cache, max_new_tokens=32, do_sample=False)
    assert resumed.tolist() == went_on.tolist()


def test_the_demo_goes_the_whole_way(tmp_path: Path) -> None:
    real_model("smollm2")
    out = tmp_path / "demo.json"
    result = subprocess.run(
        [sys.executable, "-m", "kvtcd", "demo", "--json", str(out)],
        capture_output=True, text=True, timeout=1400, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(out.read_text())

    assert {"command", "version", "machine", "date"} <= set(figures)
    assert figures["raw_bytes"] == figures["tokens"] * 23_040
    assert figures["ratio_codec"] > 13
    assert figures["ratio"] == pytest.approx(figures["raw_bytes"] / figures["stored_bytes"])
    assert figures["ratio"] > 11
    assert figures["kl_mean"] < 0.03
    assert figures["top1_agreement"] > 0.93
    assert figures["answers"][0]["source"] == "disk"
    assert [answer["source"] for answer in figures["answers"][1:]] == ["host", "host"]
    assert "Konwiktorska" in figures["answers"][0]["reused"]
    turn = figures["second_turn"]
    assert turn["generated"] > 0, "what the model said itself was reused"
    assert turn["tokens"] > figures["tokens"]
