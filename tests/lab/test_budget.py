"""`kvtcd eval budget` on a tiny model: budgets, profiles that are kept, tables, pictures, and the command."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.calibration import TEXTS, run, tiny_model
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.codec.profile import store
from kvtcd.core.errors import ConfigError
from kvtcd.core.layout import Dtype
from kvtcd.lab import budget as module
from kvtcd.lab import models
from kvtcd.lab.budget import Figures, command, show
from kvtcd.lab.budget_plot import draw

IDENTITY = models.identity
"""Before any test replaces it."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A command that finds the tiny model, and calibrates it on budgets of its own size; notes which."""
    (tmp_path / "checkpoints").mkdir()
    loaded, calibrated = tiny_model(tmp_path / "model"), []

    def profile_for(_loaded, _phases, *, tokens: int) -> Path:
        calibrated.append(tokens)
        return store(run(loaded, tmp_path / "checkpoints", tokens=tokens).data, tmp_path)

    monkeypatch.setattr(module, "profile_for", profile_for)
    monkeypatch.setattr(models, "load", lambda _: loaded)
    monkeypatch.setattr(models, "resolve", lambda *_: loaded.folder)
    monkeypatch.setattr(models, "identity", lambda found, *_: IDENTITY(found, Dtype.F32, block_tokens=64))
    for text in TEXTS[:2]:
        (tmp_path / f"{text.name}.txt").write_text(text.text)
    return calibrated


def study(tmp_path: Path, budgets: list[int], codecs: tuple[str, ...] = ("kvtc:16", "kvtc2:4")) -> dict:
    command(
        model="tiny", codecs=codecs, files=[tmp_path / "long.txt", tmp_path / "short.txt"], budgets=budgets,
        context=200, continuation=20, per_file=3, threads=1, json=tmp_path / "it.json",
        plot=tmp_path / "it.svg",
    )  # fmt: skip
    return json.loads((tmp_path / "it.json").read_text())


def test_each_budget_is_calibrated_once_and_measured_with_each_codec(
    made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = study(tmp_path, [24 * 32, 8 * 32, 24 * 32])
    assert made == [24 * 32, 8 * 32]  # what the recipe cannot give is said at once
    assert written["command"] == "eval budget"
    assert (written["documents"], written["files"]) == (4, ["long.txt", "short.txt"])
    assert [(row["codec"], row["tokens"]) for row in written["rows"]] == [
        ("kvtc", 256), ("kvtc", 768), ("kvtc2", 256), ("kvtc2", 768),
    ]  # fmt: skip
    for row in written["rows"]:
        assert row["kl_lo"] <= row["kl"] <= row["kl_hi"]
        assert set(row["dimension"]) == {"k", "v"}
        assert all(
            0 < own["coded"] <= 128 and 1 <= own["participation"] <= 128 for own in row["dimension"].values()
        )
    assert [row["times"] for row in written["rows"][1::2]] == [1, 1]
    assert {advice["codec"] for advice in written["recommended"]} == {"kvtc", "kvtc2"}
    assert (tmp_path / "it.svg").read_bytes().startswith(b"<?xml")
    printed = capsys.readouterr().out
    assert "kvtc2:4: " in printed
    assert "dim.: participation ratio" in printed


def test_a_codec_that_a_budget_has_no_profile_for_is_left_out_and_said(made, tmp_path: Path) -> None:
    written = study(tmp_path, [8 * 32], ("kvtc:16", "kvtc2:100000"))
    assert made == [256]
    assert [row["codec"] for row in written["rows"]] == ["kvtc"]
    assert len(written["skipped"]) == 1
    assert written["skipped"][0].startswith("256 tokens: --codec: kvtc2:100000 cannot be had: ")


@pytest.mark.parametrize("codec", ["kvtc2", "kvtc2:0.02", "lossless"])
def test_a_codec_without_a_ratio_is_refused_before_the_work(made, tmp_path: Path, codec: str) -> None:
    with pytest.raises(ConfigError, match=rf"--codec: '{codec}': budgets are compared at a ratio"):
        study(tmp_path, [256], (codec,))
    assert not made


def test_tables_fit_a_terminal_and_advice_is_in_words(made, tmp_path: Path) -> None:
    del made
    console = Console(width=80, record=True, file=io.StringIO())
    row = {"codec": "kvtc2", "dial": 64.0, "ratio": 59.04, "times": 1.0, "times_lo": 1.0, "times_hi": 1.0}
    row |= {"dimension": {name: module.Dimension(1234, 151.2) for name in "kv"}}
    rows = tuple(
        module.Row(tokens=tokens, kl=kl, kl_lo=kl * 0.9, kl_hi=kl * 1.1, **row)
        for tokens, kl in ((1024, 0.5), (16_384, 0.0171), (65_536, 0.0163))
    )
    figures = Figures(
        model="toy", files=(), context=1024, continuation=128, documents=16, rows=rows,
        recommended=tuple(module.advise(rows)), skipped=("2,048 tokens: why",),
    )  # fmt: skip
    show(console, figures)
    printed = console.export_text()
    assert "…" not in printed
    assert "Left out: 2,048 tokens: why" in printed
    words = " ".join(printed.split())
    assert (
        "kvtc2:64: 16,384 tokens do. KL .0171 at ratio 59.0 is within the interval of 65,536 tokens" in words
    )
    show(console, dataclasses.replace(figures, rows=rows[::2], recommended=tuple(module.advise(rows[::2]))))
    assert "no smaller budget comes near 65,536" in console.export_text()
    draw(figures, tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_line_hands_over_every_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").touch()
    given = {}
    monkeypatch.setattr(module, "command", lambda **options: given.update(options))
    options = (
        "--model m --codec kvtc2:64 --codec kvtc:16 --text a.txt --tokens 1024 --tokens 4096 --context 512"
    )
    options += " --continue 64 --windows 4 --threads 2 --plot p.png --json j"
    result = CliRunner().invoke(app, ["eval", "budget", *options.split()])
    assert result.exit_code == 0, result.output
    assert given == {
        "model": "m", "codecs": ["kvtc2:64", "kvtc:16"], "files": [Path("a.txt")], "budgets": [1024, 4096],
        "context": 512, "continuation": 64, "per_file": 4, "threads": 2, "plot": Path("p.png"),
        "json": Path("j"),
    }  # fmt: skip
    CliRunner().invoke(app, ["eval", "budget", "--model", "m", "--codec", "kvtc:16", "--text", "a.txt"])
    assert given["budgets"] == (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
