"""Says what a machine lacks for `gpu_check.sh`, and how to bring it: ``python -m support.gpu_ready``.

Needs Python alone, until there is `packaging`, and torch.
"""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution

    from packaging.requirements import Requirement

NEEDED_BY_TESTS = {"blockbuster", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout"}
"""Beyond what the package itself depends on."""
FAILED, NO_DEVICE, UNAVAILABLE = 1, 3, 69
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LEAVE_OUT = "NVCOMP"
"""Of the environment: ``no`` says that nvCOMP is left out on purpose."""
CARD = Path("/dev/nvidiactl")
"""There wherever the driver of a card has been loaded."""


def project() -> dict[str, object]:
    """Return what the package says of itself."""
    found: dict[str, object] = tomllib.loads(_PROJECT.read_text("utf-8"))["project"]
    return found


def asked(project: dict[str, object]) -> list[str]:
    """Return the requirements without which nothing runs."""
    further = {each for extra in project["optional-dependencies"].values() for each in extra}
    return [*project["dependencies"], *sorted(each for each in further if _name(each) in NEEDED_BY_TESTS)]


def walk(requirements: Iterable[str]) -> Iterator[tuple[Requirement, Distribution | None, bool]]:
    """Yield requirements and all that they require in turn, what there is of each, whether it was given."""
    from packaging.requirements import Requirement  # noqa: PLC0415 - may not be there

    left = [(Requirement(each), "", True) for each in requirements]
    seen = set()
    while left:
        one, extra, given = left.pop(0)
        if one.marker and not one.marker.evaluate({"extra": extra}):
            continue
        found = _there(one.name)
        yield one, found, given
        for further in ("", *sorted(one.extras)) if found else ():
            if (place := (found.metadata["Name"], further)) not in seen:
                seen.add(place)
                left += [(Requirement(each), further, False) for each in found.requires or ()]


def lacking(requirements: Iterable[str]) -> list[str]:
    """Return what has to be brought, as pip takes it, of requirements and of all that they require in turn.

    What is there in a version that only another package does not like counts as there.
    """
    missing = {
        f"{one.name}{one.specifier}": None
        for one, found, given in walk(requirements)
        if found is None or (given and not one.specifier.contains(found.version, prereleases=True))
    }
    return list(missing)


def how(missing: Iterable[str]) -> str:
    """Say with which commands wheels come."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(map(shlex.quote, missing))
    return (
        f"  where there is a network, Linux, and {os.uname().machine}:"
        f" {python} -m pip wheel --wheel-dir wheels {names}\n"
        f"  and here: {python} -m pip install --no-index --find-links wheels {names}"
    )


def nvcomp(project: dict[str, object], cuda: str | None) -> list[str]:
    """Return the requirements of nvCOMP for the CUDA that torch was built with."""
    return project["optional-dependencies"][f"cu{(cuda or '13').split('.')[0]}"]


def fault() -> str | None:
    """Say why CUDA cannot be used, although there is a card; None if it can be."""
    import torch  # noqa: PLC0415 - only where it is there

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        if int(torch.ones(3, device="cuda").sum()) != 3:
            return "the device adds wrongly"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    """Report, and return an exit status.

    `UNAVAILABLE` where something needed is missing, `NO_DEVICE` without a card, `FAILED` where there is one
    that torch cannot use.
    """
    say, own = print, project()
    try:
        missing = lacking(asked(own))
    except ModuleNotFoundError:
        missing = ["packaging", *(each for each in asked(own) if _there(_name(each)) is None)]
    if missing:
        say("missing:", *missing)
        say(how(missing))
        return UNAVAILABLE
    import torch  # noqa: PLC0415 - only where it is there

    if not torch.cuda.is_available() and not CARD.exists():
        say("no CUDA device: nothing is run, nothing is measured")
        return NO_DEVICE
    if why := fault():
        say("there is a card, and it cannot be used:", why)
        return FAILED
    if missing := lacking(nvcomp(own, torch.version.cuda)):
        on_purpose = os.environ.get(LEAVE_OUT) == "no"
        say(
            "without nvCOMP,"
            if on_purpose
            else f"without nvCOMP this fails in the end ({LEAVE_OUT}=no leaves it out);"
        )
        say(how(missing))
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    return 0


def _there(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _name(requirement: str) -> str:
    """Return the name of a requirement, without extras, versions and markers."""
    for end in "[<>=!~; ":
        requirement = requirement.partition(end)[0]
    return requirement


if __name__ == "__main__":
    sys.exit(main())
