"""All tasks by name, and which of them tell something about a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtcd.core.errors import ConfigError
from kvtcd.lab.tasks.chat import CHAT
from kvtcd.lab.tasks.item import Task
from kvtcd.lab.tasks.published import PUBLISHED
from kvtcd.lab.tasks.synthetic import SYNTHETIC

TASKS = {task.name: task for task in (*PUBLISHED, CHAT, *SYNTHETIC)}


def chosen(names: Sequence[str], data: Path | None) -> tuple[list[Task], dict[str, str]]:
    """Return the tasks of these names; without any, all that can be had.

    Args:
        names: of the command line.
        data: folder of data files, if there is one.

    Returns:
        Tasks, and by name of those left out the reason.

    Raises:
        ConfigError: no such task, or its file is not there.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise ConfigError("--task", "", f"{unknown[0]!r} is not one of {', '.join(TASKS)}")
    left_out = {}
    for name in names or TASKS:
        task = TASKS[name]
        if task.file and not data:
            left_out[name] = f"needs {task.file}; name its folder with --data or KVTCD_DATA"
        elif task.file and data and not (data / task.file).is_file():
            left_out[name] = f"needs {task.file}, which is not in {data}"
    if names and left_out:
        name, why = next(iter(left_out.items()))
        raise ConfigError("--task", name, why)
    return [TASKS[name] for name in names or TASKS if name not in left_out], left_out


def able(tasks: Sequence[Task], parameters: int) -> tuple[list[Task], dict[str, str]]:
    """Return tasks at which a model of so many parameters does more than guess, and why not the others."""
    left_out = {
        task.name: f"a model of less than {task.parameters / 1e9:g} billion parameters only guesses"
        for task in tasks
        if parameters < task.parameters
    }
    return [task for task in tasks if task.name not in left_out], left_out
