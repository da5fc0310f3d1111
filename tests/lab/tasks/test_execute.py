"""What a program may do, and how it ends."""

import time
from pathlib import Path

import pytest
from support.patience import PATIENCE_S

from kvtcd.lab.tasks.execute import passes


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("", True),
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("this is no Python", False),
        ("import sys; sys.exit(3)", False),
        ("import os; assert os.listdir() == ['answer.py']", True),
        ("import os; assert 'HOME' not in os.environ", True),
        ("block = bytearray(2 << 30)", False),
        ("open('big', 'wb').write(bytes(2 << 20))", False),
        ("input()", False),
    ],
)
def test_a_program_passes_when_it_ends_well_within_its_bounds(program: str, passed: bool) -> None:
    assert passes(program, seconds=int(PATIENCE_S)) is passed


def test_an_endless_program_is_ended_with_what_it_started(tmp_path: Path) -> None:
    born = tmp_path / "born"
    program = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
pathlib.Path({str(born)!r}).write_text(str(child.pid))
time.sleep(10_000)
"""
    for seconds in (1, 4, 16, 64):  # a busy machine may need longer to begin
        assert not passes(program, seconds=seconds)
        if born.exists() and born.read_text():
            break
    deadline = time.monotonic() + PATIENCE_S
    while runs(int(born.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(number: int) -> bool:
    """Tell whether a process is there and not only waits for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
