"""Tests against real serving frameworks. They have an environment of their own: `make test-peers`."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemons import LOSSLESS, new_daemon

from kvtcd.client.weights import weights_digest
from kvtcd.core.errors import Unavailable
from kvtcd.lab.calibrate import recipe_folder
from kvtcd.lab.models import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtcd.lab.daemon import Daemon

NEEDS = {
    name: f"{name} is not installed here; `make test-peers` makes an environment that has it"
    for name in ("vllm", "lmcache", "sglang")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a framework that is not here."""
    for item in items:
        if item.get_closest_marker("peers"):
            for package in item.get_closest_marker("peers").args:
                if find_spec(package) is None:
                    item.add_marker(pytest.mark.skip(reason=NEEDS[package]))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's; how its logs end is shown where a test fails."""
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        yield Path(name)
        for log in sorted(Path(name).glob("*.log")):
            print(f"{log.name}:", *log.read_text(errors="replace").splitlines()[-40:], sep="\n")  # noqa: T201


@pytest.fixture
def daemon(folder: Path) -> Daemon:
    """A daemon that keeps every bit, and does not run yet."""
    return new_daemon(folder, policy=LOSSLESS)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the model; skips the test where it cannot be had."""
    try:
        return resolve("smollm2")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def profiles(smollm2: Path) -> Path:
    """The folder of its profile; skips the test where there is none: vLLM's transformers cannot calibrate."""
    folder = recipe_folder(weights_digest(smollm2))
    if not folder.is_dir():
        pytest.skip("SmolLM2 was not calibrated here; `make test` and `kvtcd demo` do that")
    return folder
