"""What a command line calls a device."""

from __future__ import annotations

import torch

from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator
from kvtcd.core.errors import ConfigError, Unavailable


def accelerator_for(device: str) -> Accelerator | None:
    """Return what works on ``cpu``, which is None, ``cuda`` or ``cuda:1``.

    Raises:
        ConfigError: it is none of these.
        Unavailable: it is not there.
    """
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigError("--device", "", f"{device!r} is neither cpu nor cuda nor cuda:N")
    if int(index or "0") >= torch.cuda.device_count():
        raise Unavailable(f"device {device} cannot be used: there is no CUDA device {index or 0} here")
    where = torch.device(device)
    return Accelerator.on(where, Residency())
