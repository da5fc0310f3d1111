"""`kvtcd eval guard` on a tiny model; and what the guard makes of corrupted caches of a real one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.calibration import TEXTS, run, tiny_model
from support.models import real_model
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.codec.profile import store
from kvtcd.core.errors import ConfigError
from kvtcd.core.layout import Dtype
from kvtcd.lab import guard as module
from kvtcd.lab import models
from kvtcd.lab.corruption import CORRUPTIONS
from kvtcd.lab.guard import Figures, command, made_up, show
from kvtcd.lab.guard_points import Point, Rank

IDENTITY = models.identity
"""Before any test replaces it."""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "checkpoints").mkdir()
    loaded = tiny_model(tmp_path / "model")
    store(run(loaded, tmp_path / "checkpoints").data, tmp_path).rename(tmp_path / "it.safetensors")
    monkeypatch.setattr(module.models, "load", lambda _: loaded)
    monkeypatch.setattr(module.models, "resolve", lambda *_: loaded.folder)
    monkeypatch.setattr(module.models, "identity", lambda found: IDENTITY(found, Dtype.F32, block_tokens=64))
    for text in TEXTS[:2]:
        (tmp_path / f"{text.name}.txt").write_text(text.text)
    return loaded


def guarded(tmp_path: Path, codec: str = "kvtc2:4", *, windows: int = 2, context: int = 200) -> dict:
    command(
        model="tiny", profile=tmp_path / "it.safetensors", codec=codec,
        files=[tmp_path / "long.txt", tmp_path / "short.txt"], context=context, continuation=20,
        per_file=windows, threads=1, json=tmp_path / "it.json",
    )  # fmt: skip
    return json.loads((tmp_path / "it.json").read_text())


@pytest.mark.usefixtures("tiny")
def test_texts_made_up_documents_and_corrupted_caches_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = guarded(tmp_path)
    assert written["command"] == "eval guard"
    assert (written["codec"], written["dial"], written["bound"]) == ("kvtc2", 4, 2)
    rows = {row["name"]: row for row in written["rows"]}
    assert list(rows) == ["long.txt", *CORRUPTIONS, "short.txt", "random tokens", "base64"]
    assert {name: row["documents"] for name, row in rows.items() if name not in CORRUPTIONS} == {
        "long.txt": 2, "short.txt": 1, "random tokens": 2, "base64": 2,
    }  # fmt: skip
    for name, row in rows.items():
        assert row["blocks"] == 2 * row["documents"]  # the last two blocks of 200 tokens are in the window
        assert 0 <= row["finer"] + row["refused"] <= 2 * row["blocks"]
        if name != "one NaN":
            assert 0 < row["kl"] <= row["kl_most"] < 1
    assert rows["one NaN"]["refused"] == 2  # one block of each document, and it has no divergence
    assert [rows["one NaN"][name] for name in ("error", "kl", "kl_bare")] == [None] * 3
    assert rows["layer + 3 sigma"]["error"] > 2 > rows["long.txt"]["error"]
    assert rows["layer + 3 sigma"]["finer"] + rows["layer + 3 sigma"]["refused"] == 4
    assert written["rank_of_texts"]["documents"] == 7
    assert written["rank_of_all"]["documents"] == 7 + 2 * (len(CORRUPTIONS) - 1)
    assert "Rank correlation of error and KL without a guard" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("codec", ["kvtc:16", "kvtc2", "lossless"])
def test_a_codec_without_guard_or_dial_is_refused(tmp_path: Path, codec: str) -> None:
    with pytest.raises(ConfigError, match=f"'{codec}': only kvtc2 has a guard; say for instance kvtc2:64"):
        guarded(tmp_path, codec)


@pytest.mark.usefixtures("tiny")
def test_one_document_of_each_kind_is_enough(tmp_path: Path) -> None:
    rows = guarded(tmp_path, windows=1)["rows"]
    assert {row["documents"] for row in rows} == {1}


@pytest.mark.usefixtures("tiny")
def test_a_short_text_is_refused_before_a_profile_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "profile_source", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ConfigError, match="tokens, less than"):
        guarded(tmp_path, context=100_000)


def test_made_up_documents_are_the_same_every_time_and_have_their_length(tiny) -> None:
    found = made_up(tiny, 50, 3)
    assert [(name, len(tokens)) for name, tokens in found] == [("random tokens", 50)] * 3 + [
        ("base64", 50)
    ] * 3
    assert found == made_up(tiny, 50, 3)
    assert len({tokens for _, tokens in found}) == 6
    assert max(max(tokens) for _, tokens in found) < 64


def test_tables_fit_a_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    rows = tuple(Point(name, 4, 16, 12, 16, 123.45, 118.3, 0.0163, 0.1234, 0.4321) for name in CORRUPTIONS)
    rank = Rank(24, 0.67, 0.4, 0.8)
    show(console, Figures("toy", None, "kvtc2", 64, 2, 1024, 128, rows, rank, rank))
    printed = console.export_text()
    assert "…" not in printed
    assert "over 24 documents (all): .67 (.40 to .80)." in " ".join(printed.split())


def test_the_command_line_hands_over_every_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "p"):
        Path(name).touch()
    given = {}
    monkeypatch.setattr(module, "command", lambda **options: given.update(options))
    options = "--model m --codec kvtc2:64 --text a.txt --text b.txt --profile p --context 512 --continue 64"
    result = CliRunner().invoke(app, ["eval", "guard", *options.split(), "--windows", "3", "--json", "j"])
    assert result.exit_code == 0, result.output
    assert given == {
        "model": "m", "codec": "kvtc2:64", "files": [Path("a.txt"), Path("b.txt")], "profile": Path("p"),
        "context": 512, "continuation": 64, "per_file": 3, "threads": 1, "json": Path("j"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)  # with the calibration
def test_what_is_stored_of_corrupted_caches_of_a_real_model_is_close_to_them(tmp_path: Path) -> None:
    """However wrong a cache is, the model reads on behind what was stored as behind the cache itself."""
    real_model("smollm2")
    arguments = [
        "eval", "guard", "--model", "smollm2", "--codec", "kvtc2:64", "--windows", "2", "--context", "512",
        "--continue", "64", "--text", str(ROOT / "tests" / "data" / "encyclopedia.txt"),
        "--json", str(tmp_path / "guard.json"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "guard.json").read_text())["rows"]}
    own = rows["encyclopedia.txt"]
    assert own["finer"] == own["refused"] == 0
    assert own["kl"] == own["kl_bare"] < 0.1
    everywhere = rows["all + 0.5 sigma"]
    assert 2 * (everywhere["finer"] + everywhere["refused"]) > everywhere["blocks"]
    assert everywhere["kl"] < min(0.2, 0.8 * everywhere["kl_bare"])
    assert rows["one NaN"]["refused"] == 2  # one block of each document
    for name in ("keys x 4", "layer zeroed", "head permuted", "layer + 3 sigma"):
        assert rows[name]["error"] > own["error"]
        assert rows[name]["refused"] == rows[name]["blocks"]
        assert rows[name]["kl"] < 0.2
