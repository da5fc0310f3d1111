"""What a program may do, and how it ends."""

import time
from pathlib import Path

import pytest

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
    assert passes(program) is passed


def test_an_endless_program_is_ended_with_what_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(mark)!r}).touch()"
    program = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)"
    )
    began = time.monotonic()
    assert not passes(program, seconds=1)
    assert time.monotonic() - began < 10
    time.sleep(2)
    assert not mark.exists()
