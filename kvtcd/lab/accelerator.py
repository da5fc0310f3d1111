"""What a command line calls a device."""

from __future__ import annotations

import torch

from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator
from kvtcd.core.errors import Unavailable


def accelerator_for(device: str) -> Accelerator | None:
    """Return what works on ``cpu``, which is None, ``cuda`` or ``cuda:1``.

    Raises:
        Unavailable: it is not there.
    """
    if device == "cpu":
        return None
    index = device.partition(":")[2]
    if int(index or "0") >= torch.cuda.device_count():
        raise Unavailable(f"device {device} cannot be used: there is no CUDA device {index or 0} here")
    where = torch.device(device)
    return Accelerator.on(where, Residency())
