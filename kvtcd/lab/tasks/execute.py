"""Running a program that a model wrote.

It runs in a process of its own, in an empty folder, without the environment and user packages, and with
bounds on time, memory and what it may write. That stops accidents, not malice: it has the rights of whoever
runs it.
Only `--metric code` gets here; use a container for models and sets that you do not trust.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

SECONDS = 10
_BOUNDED = """
import resource, runpy, sys
for kind, most in ((resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_AS, 1 << 30),
                   (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (most, most))
runpy.run_path("answer.py", run_name="__main__")
"""


def passes(program: str, seconds: int = SECONDS) -> bool:
    """Run a Python program; tell whether it came to its end without an error."""
    with TemporaryDirectory(prefix="kvtcd-") as folder:
        Path(folder, "answer.py").write_text(program, "utf-8")
        process = subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
            [sys.executable, "-I", "-c", _BOUNDED.format(seconds=seconds)],
            cwd=folder, env={}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
