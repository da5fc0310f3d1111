"""Scores of tasks and their differences, on replies made up."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.evaluate import Size
from kvtcd.lab.figures import write_json
from kvtcd.lab.tasks.item import Item, Reply, Task, Turn
from kvtcd.lab.tasks.rows import Pair, Scores, show
from kvtcd.lab.tasks.score import greedy, likelihood

ITEMS = [Item((Turn("a"), Turn("b", "c")))] * 4
TASK = Task("toy", lambda _: ITEMS, {"accuracy": greedy, "loglik": likelihood})
TOKEN_BITS = 2
FINE, COARSE = Spec("kvtc", 8), Spec("kvtc", 32)


def replies(*logprobs: float, greedy: int) -> list[Reply]:
    return [Reply(logprobs=(value,), greedy=n < greedy) for n, value in enumerate(logprobs)]


def size(coded: float) -> Size:
    return Size(coded_raw=100, coded=coded, all_raw=200, all=coded + 50)


@pytest.fixture
def scores() -> Scores:
    packed = {
        FINE: [(reply, size(10)) for reply in replies(-1.1, -2.2, -3.1, -4.2, greedy=3)],
        COARSE: [(reply, size(n)) for n, reply in enumerate(replies(-2, -3, -4, -5, greedy=1), start=1)],
    }
    return Scores.of(TASK, ITEMS, replies(-1, -2, -3, -4, greedy=2), packed, TOKEN_BITS)


def test_rows_are_means_and_paired_differences(scores: Scores) -> None:
    rows = {(row.metric, row.dial): row for row in scores.rows}
    assert len(rows) == 4
    row = rows["loglik", 8]
    assert (row.task, row.codec, row.n) == ("toy", "kvtc", 4)
    assert (row.score, row.score_raw, row.delta) == pytest.approx((-2.65, -2.5, -0.15))
    half = stats.t.ppf(0.975, 3) * np.std([0.1, 0.2, 0.1, 0.2], ddof=1) / 2
    assert (row.lo, row.hi) == pytest.approx((-0.15 - half, -0.15 + half), rel=0.1)
    assert rows["accuracy", 8].delta == 0.25
    assert rows["accuracy", 32].delta == -0.25
    # each item loses one: nothing varies
    assert (rows["loglik", 32].lo, rows["loglik", 32].hi) == pytest.approx((-1, -1))


def test_ratios_are_of_all_items_together(scores: Scores) -> None:
    assert [row.ratio for row in scores.rows] == [10, 40, 10, 40]


def test_codecs_are_compared_with_the_first(scores: Scores) -> None:
    accuracy, loglik = scores.pairs
    assert (accuracy.of, accuracy.over, accuracy.delta) == ("kvtc:32", "kvtc:8", -0.5)
    assert loglik.delta == pytest.approx(-0.85)
    assert loglik.lo < -0.85 < loglik.hi < 0


def test_nothing_coded_is_no_ratio(tmp_path) -> None:
    none = Size(coded_raw=0, coded=0, all_raw=10, all=10)
    packed = {spec: [(Reply((0.0,)), none)] * 4 for spec in (FINE, COARSE)}
    scores = Scores.of(TASK, ITEMS, replies(0, 0, 0, 0, greedy=4), packed, TOKEN_BITS)
    row = scores.rows[0]
    assert all(map(math.isnan, (row.ratio, row.score, row.delta, row.lo, row.hi)))
    assert (row.uncoded, row.uncoded_tokens, row.score_raw, scores.pairs) == (4, 5, 1, [])
    (line,) = [line for line in shown(scores).splitlines() if "was packed" in line]
    assert line == (
        "toy: nothing was packed at the dial: contexts of 5 tokens at most; "
        "codecs code what lies beyond the first 4 and the last 128."
    )
    (first, *_) = [line for line in shown(scores).splitlines() if "kvtc:8" in line]
    assert first.split() == ["toy", "accuracy", "kvtc:8", "—", "4", "1.000", "—", "—", "—"]
    write_json(tmp_path / "x.json", "eval tasks", {"rows": [{"ratio": row.ratio, "n": (1, 2.5)}]})
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == [{"ratio": None, "n": [1, 2.5]}]


def test_items_of_which_nothing_is_coded_are_counted() -> None:
    none = Size(coded_raw=0, coded=0, all_raw=240, all=10)
    packed = {FINE: [(Reply((-1.0,)), one) for one in (none, size(10), size(10), none)]}
    scores = Scores.of(TASK, ITEMS, replies(0, 0, 0, 0, greedy=4), packed, TOKEN_BITS)
    assert [(row.uncoded, row.uncoded_tokens, row.delta) for row in scores.rows] == [(2, 120, -1)] * 2
    assert "toy: nothing of 2 of 4 items was packed at the dial: contexts of 120 tokens" in shown(scores)


def shown(scores: Scores) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show(console, "toy", scores.rows, scores.pairs, {})
    return console.export_text()


def test_tables_fit_a_terminal(scores: Scores) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, "toy", scores.rows, scores.pairs, {"mmlu": "because"})
    printed = console.export_text()
    assert "…" not in printed
    assert "mmlu was left out: because." in printed
    assert isinstance(scores.pairs[0], Pair)
