"""What a crash child can be asked to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.crash import damage, devices, images, killing, processes

TASKS: dict[str, Callable[..., Any]] = {
    "write_until_killed": killing.write_until_killed,
    "die_at": killing.die_at,
    "write_recorded": images.write_recorded,
    "open_image": images.open_image,
    "inspect": damage.inspect,
    "fill_device": devices.fill_device,
    "fail_call": devices.fail_call,
    "break_twice": devices.break_twice,
    "open_state": processes.open_state,
    "hold_state": processes.hold_state,
    "create_with_umask": processes.create_with_umask,
    "close_under_load": processes.close_under_load,
    "use_after_fork": processes.use_after_fork,
}
