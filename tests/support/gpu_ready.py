"""Says what a machine lacks for `gpu_check.sh`: ``python -m support.gpu_ready``. Needs Python alone."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED_BY_TESTS = ("blockbuster", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
"""Beyond what the package itself depends on."""
UNAVAILABLE, NO_DEVICE = 69, 3


def absent(names: list[str]) -> list[str]:
    """Return the distributions that are not installed."""
    missing = []
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing


def needed() -> list[str]:
    """Return the distributions without which nothing runs."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    own = [re.match(r"[A-Za-z0-9._-]+", requirement)[0] for requirement in project["dependencies"]]
    return [*own, *NEEDED_BY_TESTS]


def nvcomp(cuda: str | None) -> list[str]:
    """Return the distributions of nvCOMP for the CUDA that torch was built with."""
    major = (cuda or "13").split(".")[0]
    return [f"nvidia-nvcomp-cu{major}", f"nvidia-libnvcomp-cu{major}"]


def main() -> int:
    """Report; `UNAVAILABLE` where something needed is missing, `NO_DEVICE` without a GPU."""
    if missing := absent(needed()):
        print("missing, bring these wheels:", *missing)  # noqa: T201 - a script
        return UNAVAILABLE
    import torch  # noqa: PLC0415 - only where it is there

    if missing := absent(nvcomp(torch.version.cuda)):
        print("without nvCOMP; to measure it, bring these wheels:", *missing)  # noqa: T201 - a script
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is run, nothing is measured")  # noqa: T201 - a script
        return NO_DEVICE
    print(torch.cuda.get_device_name(), "torch", torch.__version__)  # noqa: T201 - a script
    return 0


if __name__ == "__main__":
    sys.exit(main())
