import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

import kvtcd
from kvtcd import terminal

NAMES = ["kvtc2:16,guard=off", "kvtc2:16,guard=on"]
COLUMNS = [("codec", str), *((f"a heading of {n} words", lambda _: "1.2345 to 6.7890") for n in range(9))]


def printed(shown):
    return shown.file.getvalue()


def test_a_pipe_has_no_width(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    shown = terminal.console()
    shown.print(terminal.Table(title="t").fill(COLUMNS, NAMES))
    shown.print("word " * 500)
    lines = sys.stdout.getvalue().splitlines()
    for name in NAMES:
        assert sum(name in line for line in lines) == 1
    assert any(all(heading in line for heading, _ in COLUMNS) for line in lines)
    assert lines[-1].split() == ["word"] * 500


def test_a_narrow_terminal_folds_and_cuts_nothing():
    shown = Console(file=io.StringIO(), width=80)
    table = terminal.Table()
    table.add_column("codec", no_wrap=True)
    table.add_column("x")
    table.add_row("kvtc2:16," + "abcdefghijklmnopqrstuvwxyz" * 5, "y" * 60)
    shown.print(table)
    assert "…" not in printed(shown)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed(shown).splitlines()]
    assert "".join(row[0] for row in cells if row) == "kvtc2:16," + "abcdefghijklmnopqrstuvwxyz" * 5
    assert max(map(len, printed(shown).splitlines())) <= 80


def test_words_stand_left_and_figures_right():
    shown = Console(file=io.StringIO(), width=80)
    shown.print(terminal.Table(box=None).fill([("name", str), ("n", len)], [], left={"name"}))
    table = terminal.Table().fill([("name", str), ("n", lambda one: str(len(one)))], ["a"], left={"name"})
    assert [column.justify for column in table.columns] == ["left", "right"]


def test_without_a_terminal_progress_is_lines_on_standard_error(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("kvtcd.terminal.time.monotonic", lambda: clock[0])
    with terminal.progress(terminal.console()) as progress:
        task = progress.add_task("reading", total=1000)
        for second in range(25):
            clock[0] = float(second)
            progress.advance(task, 10)
        progress.update(task, description="fitting", completed=500)
        progress.update(task, completed=510)
        for _ in progress.track(range(3), description="checking"):
            pass
    out, err = capsys.readouterr()
    assert not out
    lines = [re.sub(r", \d+ s$", "", line) for line in err.splitlines()]
    assert lines == [
        "reading", "reading: 110 of 1,000", "reading: 210 of 1,000", "fitting: 500 of 1,000", "checking",
    ]  # fmt: skip


def test_with_a_terminal_progress_is_bars_where_the_command_prints(capsys):
    shown = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with terminal.progress(shown) as progress:
        progress.update(progress.add_task("reading", total=2), completed=1)
    assert "reading" in printed(shown)
    assert "50%" in printed(shown)
    assert not capsys.readouterr().err


def test_silent_progress_says_nothing(capsys):
    with terminal.silent() as progress:
        progress.console.print("a word")
        progress.update(progress.add_task("reading", total=2), completed=1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("made", [r"\bConsole\(", r"\bProgress\(", r"rich\.table import", r"import track"])
def test_commands_print_by_these_alone(made):
    root = Path(kvtcd.__file__).parent
    others = [path for path in root.rglob("*.py") if path != Path(terminal.__file__)]
    assert not [path for path in others if re.search(made, path.read_text("utf-8"))]
