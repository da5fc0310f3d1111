"""What a configuration asks of this machine, memory and CUDA devices: had, or refused with file and field."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvtcd.codec.foreign import Foreign
from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator
from kvtcd.config import Config, show_bytes
from kvtcd.core.devices import DeviceName, GpuName
from kvtcd.core.exhaustion import exhausted
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
    for asked in (*_holding(config, policies), *_packing(config, policies)):
        _cuda(config, asked)


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


def device_memories(config: Config, policies: Sequence[Policy]) -> dict[GpuName, DeviceMemory]:
    """Return the GPU tier: the device of config.toml first, then those that policies name; empty without one.

    Args:
        config: what each of them has.
        policies: of which some may name others.
    """
    found: dict[GpuName, DeviceMemory] = {}
    for asked in _holding(config, policies):
        device, capacity = _cuda(config, asked), config.gpu.capacity
        if capacity == "auto":
            capacity = torch.cuda.get_device_properties(device).total_memory // AUTO_GPU
        try:
            found[asked.name] = DeviceMemory(capacity, device, Foreign(device).tensor)
        except RuntimeError as error:
            if not exhausted(error):
                raise
            why = f"{show_bytes(capacity)} cannot be had of {asked.name}: {error}"
            raise config.fault("gpu.capacity", why) from None
    return found


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
    for asked in _packing(config, policies):
        device, memory = _cuda(config, asked), config.codec.memory
        if device not in made:
            if memory == "auto":
                memory = torch.cuda.get_device_properties(device).total_memory // AUTO_CODEC
            residency.limit(device, memory)
            made[device] = Accelerator.on(device, residency, spared, unreplayed, asked.name)
        found[asked.name] = made[device]
    return found


def gpus(config: Config, policies: Sequence[Policy]) -> tuple[list[DeviceName], list[GpuName]]:
    """Return the names of the GPUs that are to pack, and of those that are to hold blocks."""
    packing, holding = _packing(config, policies), _holding(config, policies)
    return [asked.name for asked in packing], [asked.name for asked in holding]


class _Asked(NamedTuple):
    """A GPU that is asked for: its name, in which field of config.toml, and by what if not by that."""

    name: DeviceName
    field: str
    by: str


def _holding(config: Config, policies: Sequence[Policy]) -> list[_Asked]:
    """Return what GPUs are to hold blocks, that of config.toml first; none without a GPU tier."""
    capacity = config.gpu.capacity
    if not (torch.cuda.is_available() if capacity == "auto" else capacity):
        return []
    first = _Asked(f"cuda:{config.gpu.device}", "gpu.capacity", "gpu.device")
    named = {
        policy.promote.device: _Asked(policy.promote.device, "policies", f"promote.to of {policy.name}")
        for policy in reversed(policies)
        if policy.promote.device
    }
    return [first, *(named[name] for name in sorted(named) if name != first.name)]


def _packing(config: Config, policies: Sequence[Policy]) -> list[_Asked]:
    """Return what GPUs are to pack some blocks, in order of their names."""
    asked = [
        _Asked(policy.codec.device, "policies", f"codec.device of {policy.name}")
        for policy in reversed(policies)
        if policy.codec.device
    ]
    by = "codec.device" if ":" in config.codec.device else "gpu.device"
    asked.append(_Asked(codec_device(config), "codec.device", by))
    named = {each.name: each for each in asked if each.name != "cpu"}
    return [named[name] for name in sorted(named)]


def _cuda(config: Config, asked: _Asked) -> torch.device:
    """Return a CUDA device; ``cuda`` is that of codecs, and where config.toml names none that of blocks."""
    _, _, number = asked.name.partition(":")
    if not number:
        _, _, number = config.codec.device.partition(":")
    index = int(number or config.gpu.device)
    if index >= (found := torch.cuda.device_count()):
        why = f"asks for the CUDA device {index} ({asked.by}), and CUDA finds {found} of them"
        raise config.fault(asked.field, why)
    return torch.device("cuda", index)
