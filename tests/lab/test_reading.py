"""Windows of texts and held-out rows, against a count by hand."""

import pytest

from kvtcd.core.errors import ConfigError
from kvtcd.lab import reading as module
from kvtcd.lab.reading import SINKS, plan_reading


def text(first: int, count: int) -> range:
    return range(first, first + count)


def test_windows_are_spread_over_each_text_and_the_first_of_each_is_held_out() -> None:
    reading = plan_reading([text(0, 1000), text(5000, 95), text(9000, 9)], 130, seed=0, window=10)
    starts = [window[0] for window in reading.windows]
    assert len(starts) == 13
    assert starts[:2] == [0, 5000]
    assert reading.held_out == 2
    long = [start for start in starts if start < 5000]
    assert max(long) > 800
    assert all(window == tuple(range(window[0], window[0] + 10)) for window in reading.windows)
    assert reading.fitted_tokens == 11 * (10 - SINKS)


def test_of_many_windows_an_eighth_is_held_out() -> None:
    assert plan_reading([text(0, 6400)], 6400, seed=0, window=10).held_out == 80


def test_at_least_half_of_the_windows_are_fitted_to() -> None:
    assert plan_reading([text(n, 10) for n in range(5)], 30, seed=0, window=10).held_out == 1


def test_every_window_begins_with_what_sequences_of_the_model_begin_with() -> None:
    reading = plan_reading([text(100, 80)], 40, seed=0, window=10, start=(7, 8))
    assert all(window[:2] == (7, 8) and len(window) == 10 for window in reading.windows)
    assert sorted(token for window in reading.windows for token in window[2:])[:8] == list(range(100, 108))


def test_the_sample_is_a_seeded_choice_of_distinct_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE", 10)
    texts = [text(0, 400), text(1000, 400)]
    chosen = plan_reading(texts, 640, seed=1, window=20).chosen
    rows = [(window, row) for window, picked in enumerate(chosen) for row in picked.tolist()]
    assert len(set(rows)) == len(rows) == 10
    assert all(0 <= row < 20 - SINKS for _, row in rows)
    assert {window for window, _ in rows} == {0, 1, 2, 3}
    again, other = (plan_reading(texts, 640, seed=seed, window=20).chosen for seed in (1, 2))
    assert [r.tolist() for r in again] == [r.tolist() for r in chosen]
    assert [r.tolist() for r in other] != [r.tolist() for r in chosen]


@pytest.mark.parametrize(
    ("tokens", "why"),
    [(19, "less than two windows of 10"), (110, r"are 11 windows of 10 tokens, the texts have 10; .* 100")],
)
def test_a_budget_that_cannot_be_met_says_what_can(tokens: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--tokens: {tokens} .*{why}"):
        plan_reading([text(0, 59), text(0, 50)], tokens, seed=0, window=10)
