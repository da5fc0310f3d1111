"""`kvtcd eval tasks` as a command: on what it is asked, and on a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import real_model
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.core.errors import ConfigError
from kvtcd.lab.tasks.battery import TASKS


def invoke(*arguments: str) -> None:
    result = CliRunner().invoke(
        app, ["eval", "tasks", "--model", "smollm2", *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output


def test_a_wrong_codec_or_set_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'zip' is not one of"):
        invoke("--codec", "zip")
    (tmp_path / "own.jsonl").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        invoke("--codec", "lossless", "--file", str(tmp_path / "own.jsonl"))
    with pytest.raises(ConfigError, match="'nonsense' is not one of gsm8k"):
        invoke("--codec", "lossless", "--task", "nonsense")


def test_every_task_is_named_in_the_help() -> None:
    result = CliRunner().invoke(app, ["eval", "tasks", "--help"], env={"COLUMNS": "200"})
    assert [name for name in TASKS if name not in result.output] == []


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)  # with the calibration
def test_the_command_asks_a_real_model(tmp_path: Path) -> None:
    real_model("smollm2")
    own = tmp_path / "capitals.jsonl"
    rows = [
        {"context": f"The capital of {country} is {city}. " * 30, "question": f"The capital of {country} is",
         "answer": city, "tokens": 6, "stop": "."}
        for country, city in (("France", "Paris"), ("Spain", "Madrid"))
    ]  # fmt: skip
    own.write_text("\n".join(map(json.dumps, rows)))
    invoke(
        "--codec", "kvtc:16", "--codec", "kvtc:64", "--task", "passkey", "--file", str(own), "--n", "2",
        "--context", "400", "--json", str(tmp_path / "t.json"),
    )  # fmt: skip
    written = json.loads((tmp_path / "t.json").read_text())
    assert written["command"] == "eval tasks"
    found = {(row["task"], row["metric"], row["codec"], row["dial"]): row for row in written["rows"]}
    assert set(found) == {
        (task, metric, "kvtc", dial)
        for task, metric in (("capitals", "exact"), ("passkey", "accuracy"), ("passkey", "loglik"))
        for dial in (16, 64)
    }
    fine, coarse = found["capitals", "exact", "kvtc", 16], found["passkey", "loglik", "kvtc", 64]
    assert (fine["n"], fine["score_raw"], fine["score"], fine["delta"]) == (2, 1.0, 1.0, 0.0)
    assert 14 < fine["ratio"] < 24
    assert coarse["score"] < 0
    assert coarse["delta"] == pytest.approx(coarse["score"] - coarse["score_raw"])
    assert [(pair["of"], pair["over"]) for pair in written["pairs"]] == [("kvtc:64", "kvtc:16")] * 3
