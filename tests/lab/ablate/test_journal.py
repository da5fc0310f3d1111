"""The journal of an ablation: what was measured comes back, and nothing that is there is lost."""

import pytest

from kvtcd.core.errors import ConfigError
from kvtcd.lab.ablate.cells import Cell, Row
from kvtcd.lab.ablate.journal import Journal
from kvtcd.lab.ablate.measures import MEASURES
from kvtcd.lab.ablate.regimes import Shape

RUN, OTHER = "0a" * 32, "1b" * 32
CELL = Cell("lowrank", Shape(), (2,))
ROWS = [Row("tq-kv", 2, 2.1, dict.fromkeys(MEASURES, (0.5, 0.25)))]


@pytest.fixture
def path(tmp_path):
    """A journal with three chunks."""
    journal = Journal(tmp_path / "out.json.part", RUN)
    for first in (0, 2, 4):
        journal.put(CELL, first, ROWS)
    return tmp_path / "out.json.part"


def test_chunks_come_back(path):
    again = Journal(path, RUN)
    assert again.chunks == 3
    assert again.get(CELL, 2) == ROWS
    assert again.get(CELL, 6) is None


@pytest.mark.parametrize("cut", [1, 2, 30, 200])
def test_a_line_that_was_cut_off_is_measured_again_and_what_follows_counts(path, cut):
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    journal = Journal(path, RUN)
    assert journal.chunks == (3 if cut == 1 else 2)
    journal.put(CELL, 4, ROWS)
    journal.put(CELL, 6, ROWS)
    again = Journal(path, RUN)
    assert [again.get(CELL, first) for first in (0, 2, 4, 6)] == [ROWS] * 4


@pytest.mark.parametrize("written", ["", RUN[:20], RUN, RUN + "\n"])
def test_one_that_was_killed_at_once_is_begun(tmp_path, written):
    path = tmp_path / "part"
    path.write_text(written)
    Journal(path, RUN).put(CELL, 0, ROWS)
    assert Journal(path, RUN).get(CELL, 0) == ROWS


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text.replace(RUN, OTHER), "another run"),
        (lambda text: text.replace(RUN, '{"command": "ablate"}'), "something else"),
        (lambda text: text.replace(RUN + "\n", ""), "something else"),
        (lambda text: text.replace('"first": 2', '"first": two'), "line 5: is damaged"),
        (lambda text: text.replace('"first": 2', '"last": 2'), "line 5: is damaged"),
        (lambda text: text.replace('"kl"', '"lk"', 1), "line 3: is damaged"),
        (lambda text: text.replace("0.25", '"x"'), "line 3: is damaged"),
        (lambda text: text + "[1, 2]\n\n", "line 8: is damaged"),
        (lambda text: text + "[" * 100_000 + "\n\n", "line 8: is damaged"),
    ],
)
def test_what_is_of_another_run_or_damaged_is_refused_and_kept(path, spoil, words):
    text = spoil(path.read_text())
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Journal(path, RUN)
    assert path.read_text() == text


def test_bytes_that_are_no_text_are_refused_and_kept(path):
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be gone on with"):
        Journal(path, RUN)
    assert path.read_bytes() == b"\xff\xfe\x00"
