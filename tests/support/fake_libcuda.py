"""Builds `fake_libcuda.c`, so that processes without a GPU find a driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc")


def build(folder: Path) -> Path:
    """Return a folder for ``LD_LIBRARY_PATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "libcuda.so.1"
    subprocess.run(
        [COMPILER, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1",
         "-o", str(target), str(SOURCE)], check=True,
    )  # fmt: skip
    return folder
