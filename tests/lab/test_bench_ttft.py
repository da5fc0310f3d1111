"""Times to the first token: what is timed is where it should be, and figures are medians of the times."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from rich.progress import Progress
from support.models import random_model, tiny_llama_config
from support.prefixes import sequence

from kvtcd.core.errors import ConfigError
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import bench_ttft as bench
from kvtcd.lab.bench_ttft import Row, Times
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.ttft_plot import draw
from kvtcd.lab.ttft_shelves import STORED, Shelf

LOSSLESS = CodecChoice("lossless", None)


def measured() -> Times:
    return Times(
        prefill=[9.0, 8.0, 80.0], prefill_cpu=[6.0, 7.0, 5.0], step=[0.5, 0.25, 0.75],
        fetch={"host-raw": [0.5, 0.25, 4.0], "host-packed": [1.0] * 3, "disk": [2.0, 4.0, 3.0]},
        fetch_cpu={"host-raw": [0.25] * 3, "host-packed": [1.0, 9.0, 0.5], "disk": [2.0] * 3},
        first={"host-raw": [1.0, 1.0, 4.5], "host-packed": [1.5] * 3, "disk": [2.5, 4.5, 3.5]},
    )  # fmt: skip


def test_a_figure_is_the_median_and_is_held_against_the_prefill_of_the_same_prompt():
    assert list(measured().rows("tiny", 512)) == [
        Row("tiny", 512, "recompute", None, 9.0, 0.5, 9.0, 1.0, 6.0, 1.0),
        Row("tiny", 512, "host-raw", 0.5, 9.0, 0.5, 1.0, 18.0, 0.25, 24.0),
        Row("tiny", 512, "host-packed", 1.0, 9.0, 0.5, 1.5, 9.0, 1.0, 6.0),
        Row("tiny", 512, "disk", 3.0, 9.0, 0.5, 3.5, 3.0, 2.0, 3.0),
    ]


def test_rows_are_drawn_with_a_panel_for_each_model(tmp_path):
    rows = [row for name in ("a-1", "b") for tokens in (512, 1024) for row in measured().rows(name, tokens)]

    draw(rows, tmp_path / "plot.svg")

    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('<g id="axes_') == 2


@pytest.mark.slow
def test_every_source_gives_the_cache_back_from_where_it_should_be(tmp_path, monkeypatch):
    model = random_model(tiny_llama_config(max_position_embeddings=1024))
    model.save_pretrained(tmp_path / "tiny")
    loaded = LoadedModel(model.bfloat16(), None, tmp_path / "tiny")
    prompts = [sequence(300), sequence(520)]
    seen: list[tuple[str, int, set[str | None], int]] = []
    fetch = Shelf.load

    def load(shelf, prompt):
        name, client = shelf._prefixes.namespace, shelf._client
        found = client.match_tokens(name, prompt, salt=str(len(prompt)).encode()).blocks
        raw = client.stats()["own"][name]["tiers"]["host"]["raw"]["blocks"]
        seen.append((shelf._source, len(prompt), {block.tier for block in found}, raw))
        return fetch(shelf, prompt)

    monkeypatch.setattr(Shelf, "load", load)
    with Progress(disable=True) as progress:
        rows = bench.measure(loaded, prompts, profiles=tmp_path, choice=LOSSLESS, rounds=1, progress=progress)

    assert [(row.tokens, row.source) for row in rows] == [
        (tokens, source) for tokens in (300, 520) for source in ("recompute", *STORED)
    ]
    assert all(row.speedup == row.prefill_s / row.fetch_decode_s for row in rows if row.fetch_decode_s)
    assert all(row.ttft_s > (row.fetch_decode_s or 0) and row.cpu_s > 0 for row in rows)
    for source, _, tiers, raw in seen:
        assert tiers == {"disk" if source == "disk" else "host"}
        if source != "disk":  # there, other prompts may still be in memory too
            assert (raw > 0) == (source == "host-raw")
    json.dumps([asdict(row) for row in rows])


@pytest.mark.slow
def test_profiles_of_other_models_are_refused_before_anything_is_timed(tmp_path):
    model = random_model(tiny_llama_config())
    model.save_pretrained(tmp_path / "tiny")
    loaded = LoadedModel(model.bfloat16(), None, tmp_path / "tiny")
    with Progress(disable=True) as progress, pytest.raises(ConfigError, match="nothing would be packed"):
        bench.measure(
            loaded, [sequence(20)], profiles=tmp_path, choice=CodecChoice(), rounds=1, progress=progress
        )
