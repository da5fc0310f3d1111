"""What a configuration asks of this machine, memory and CUDA devices: had, or refused with file and field."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Sequence

import torch

from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator
from kvtcd.config import Config, show_bytes
from kvtcd.core.devices import DeviceName
from kvtcd.core.policy import Policy
from kvtcd.tiers.device import DeviceMemory
from kvtcd.tiers.memory import HostMemory

AUTO_GPU = 50
"""The part of a device that ``gpu.capacity = "auto"`` takes is one in so many."""
AUTO_CODEC = 20
"""The same for ``codec.memory``."""
DESCRIPTORS = 64
"""What a daemon has open besides the connections of clients: its files, threads' pipes, those of tenants."""


def verify(config: Config, policies: Sequence[Policy]) -> None:
    """Refuse what a start would refuse for want of it; of memory nothing is touched or kept.

    Raises:
        ConfigError: host memory, a CUDA device, or descriptors that this machine does not have.
    """
    _descriptors(config)
    host_memory(config)
    if _holds(config):
        _cuda(config, "gpu.capacity")
    for name in _packing(config, policies):
        _codec_cuda(config, name)


def _descriptors(config: Config) -> None:
    """Refuse more connections than this process may have open, with what it needs besides."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and config.limits.connections > most - DESCRIPTORS:
        why = (
            f"{config.limits.connections} are more than the {most} open files of this process allow, which "
            f"needs {DESCRIPTORS} itself; at most {max(most - DESCRIPTORS, 0)}, or raise that limit "
            "(LimitNOFILE= of the unit, ulimit -n)"
        )
        raise config.fault("limits.connections", why)


def doubts(config: Config) -> tuple[str, ...]:
    """Return what is asked of this machine that it can hardly have, and that is no reason not to start."""
    there = next(each for each in (config.daemon.state, *config.daemon.state.parents) if each.exists())
    asked, whole = config.disk.capacity, shutil.disk_usage(there).total
    if asked <= whole:
        return ()
    size = f"{whole / (1 << 30):.1f} GiB" if whole >= 1 << 30 else f"{whole / (1 << 20):.1f} MiB"
    has = f"the device of {config.daemon.state} has {size} in all"
    return (f"[disk] capacity is {show_bytes(asked)}, and {has}: once it is full, what finds room is kept",)


def host_memory(config: Config) -> HostMemory:
    """Return the host tier.

    Raises:
        ConfigError: it is more than this machine has. A mapping alone may promise more, and whoever fills
            it is killed.
    """
    asked, there = config.host.capacity, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if asked > there:
        why = f"{show_bytes(asked)} is more than the {there / (1 << 30):.1f} GiB of memory of this machine"
        raise config.fault("host.capacity", why)
    try:
        return HostMemory(asked)
    except OSError as error:
        raise config.fault("host.capacity", f"{show_bytes(asked)} cannot be had: {error}") from None


def device_memory(config: Config) -> DeviceMemory | None:
    """Return the GPU tier, None where there is none."""
    if not _holds(config):
        return None
    device, capacity = _cuda(config, "gpu.capacity"), config.gpu.capacity
    if capacity == "auto":
        capacity = torch.cuda.get_device_properties(device).total_memory // AUTO_GPU
    try:
        return DeviceMemory(capacity, device)
    except torch.OutOfMemoryError as error:
        raise config.fault("gpu.capacity", f"{show_bytes(capacity)} cannot be had: {error}") from None


def codec_device(config: Config) -> DeviceName:
    """Return where blocks are packed whose policy does not say it."""
    device = config.codec.device
    return "cuda" if (torch.cuda.is_available() if device == "auto" else device != "cpu") else "cpu"


def accelerators(
    config: Config, policies: Sequence[Policy], residency: Residency, spared: Callable[[str], None],
    unreplayed: Callable[[str], None],
) -> dict[DeviceName, Accelerator]:  # fmt: skip
    """Return the GPUs that pack and unpack, by the names that are asked for; none where the CPU does it all.

    Two names of one device have one accelerator.

    Args:
        config: which device that is unless a policy says it, and what codecs may have of each.
        policies: of which some may ask for others.
        residency: is given that as its limit.
        spared: as of `Accelerator`.
        unreplayed: as of `Accelerator.on`.
    """
    made: dict[torch.device, Accelerator] = {}
    found: dict[DeviceName, Accelerator] = {}
    for name in _packing(config, policies):
        device, memory = _codec_cuda(config, name), config.codec.memory
        if device not in made:
            if memory == "auto":
                memory = torch.cuda.get_device_properties(device).total_memory // AUTO_CODEC
            residency.limit(device, memory)
            made[device] = Accelerator.on(device, residency, spared, unreplayed, name)
        found[name] = made[device]
    return found


def _holds(config: Config) -> bool:
    """Tell whether a GPU is to hold blocks."""
    capacity = config.gpu.capacity
    return torch.cuda.is_available() if capacity == "auto" else capacity > 0


def _packing(config: Config, policies: Sequence[Policy]) -> list[DeviceName]:
    """Return what GPUs are to pack some blocks, by name, in order."""
    asked = (codec_device(config), *(policy.codec.device for policy in policies))
    return sorted({name for name in asked if name and name != "cpu"})


def _codec_cuda(config: Config, name: DeviceName) -> torch.device:
    """Return the CUDA device that the configuration or a policy names for packing."""
    _, _, number = name.partition(":")
    if not number:
        return _cuda(config, "codec.device")
    if int(number) >= (found := torch.cuda.device_count()):
        why = f"a policy asks for the CUDA device {number}, and CUDA finds {found} of them"
        raise config.fault("codec.device", why)
    return torch.device("cuda", int(number))


def _cuda(config: Config, field: str) -> torch.device:
    """Return the CUDA device that a field asks for, or has a policy ask for."""
    found = torch.cuda.device_count()
    _, _, named = config.codec.device.partition(":")
    number, by = config.gpu.device, "gpu.device"
    if field == "codec.device" and named:
        number, by = int(named), field
    if number >= found:
        why = f"asks for the CUDA device {number} ({by}), and CUDA finds {found} of them"
        raise config.fault(field, why)
    return torch.device("cuda", number)
