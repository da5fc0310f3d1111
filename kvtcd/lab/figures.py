"""The file that `--json` writes: figures, and what is needed to compare them with those of another day."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvtcd import __version__, outputs


def write_json(path: Path, command: str, figures: Mapping[str, object]) -> None:
    """Write one object: `command`, `version`, `machine`, `date`, figures; null for NaN and infinity.

    Raises:
        ConfigError: the file cannot be written.
    """
    header = {
        "command": command,
        "version": __version__,
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    written = json.dumps(header | _finite(figures), indent=1, ensure_ascii=False, allow_nan=False)
    outputs.write(path, written + "\n")


def _finite(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can hold
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case _:
            return value


def machine() -> dict[str, object]:
    """Describe this machine as far as figures depend on it."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """Name of the processor, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
