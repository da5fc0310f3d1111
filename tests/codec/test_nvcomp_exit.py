"""A process that has given nvCOMP an allocator ends with the status that it says.

The library holds the allocator in a static that outlives the interpreter. The real one can be imported, and
given an allocator, without a GPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from support.patience import PATIENCE_S

PROCESS = """
import sys
{imported}
import torch
from kvtcd.codec.nvcomp import Nvcomp
from kvtcd.codec.residency import Residency
if {hooked}:
    for _ in range(2):
        Nvcomp(api, torch.device("cpu"), Residency())
else:
    api.set_device_allocator(lambda nbytes, stream: None)
sys.exit(70)
"""
STAND_IN = """
import atexit, os, types
held = []
atexit.register(lambda: held[-1] is None or os._exit(134))  # before all else, so after it at the end
api = types.SimpleNamespace(set_device_allocator=lambda allocator=None: held.append(allocator))
"""
WHEEL = "from nvidia import nvcomp as api"


def status(imported: str, *, hooked: bool) -> int:
    """What a process ends with that is to end with 70, given an allocator by us, or without us."""
    code = PROCESS.format(imported=imported, hooked=hooked)
    return subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode


def there() -> bool:
    return importlib.util.find_spec("nvidia") is not None and bool(importlib.util.find_spec("nvidia.nvcomp"))


@pytest.mark.parametrize(
    "imported",
    [
        pytest.param(STAND_IN, id="stand-in"),
        pytest.param(
            WHEEL, id="wheel",
            marks=pytest.mark.skipif(
                not there(), reason="nvCOMP is not installed; `pip install kvtcd[cu13]` needs no GPU"
            ),
        ),
    ],
)  # fmt: skip
def test_it_does_not_end_the_process_by_a_signal(imported) -> None:
    assert status(imported, hooked=True) == 70
    assert status(imported, hooked=False) != 70, "without that it does"
