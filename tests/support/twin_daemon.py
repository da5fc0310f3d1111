"""The daemon, with a GPU for its codecs that is made of the CPU: ``python -m support.twin_daemon serve …``.

Its streams are those of `fake_cuda`. Memory that engines share by way of `fake_libcuda` lies on it.
"""

from __future__ import annotations

import pytest
import torch
from support import fake_cuda
from support.twin_memory import TwinMemory

from kvtcd import bootstrap, machine
from kvtcd.cli import main
from kvtcd.codec.staged import Accelerator


def install() -> None:
    """Let machine and torch speak of that GPU, for the rest of the process."""
    patch = pytest.MonkeyPatch()
    fake_cuda.install(patch)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    twin = Accelerator(torch.device("cpu"), foreign=TwinMemory())
    patch.setattr(machine, "accelerators", lambda *_, **__: {"cuda": twin})
    patch.setattr(bootstrap, "pin", lambda *_, **__: None)


if __name__ == "__main__":
    install()
    main()
