"""What every test gets: Hypothesis profiles, seed, umask, a watch on blocking calls and on leaked threads."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
import time
import zlib
from typing import TYPE_CHECKING

import pytest
import torch
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings
from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

if not torch.cuda.is_available() and importlib.util.find_spec("vllm") is None:
    # Kernels run in Triton's interpreter, which has to be asked for before anything imports Triton. Engines
    # would look at that too.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "default", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("gate", parent=settings.get_profile("default"), derandomize=True)
settings.register_profile("nightly", parent=settings.get_profile("default"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _no_blocking_calls_on_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("asyncio") is None:
        yield
        return
    with blockbuster_ctx("kvtcd"):
        yield


@pytest.fixture(autouse=True)
def _what_a_daemon_sets_for_its_process_ends_with_its_test() -> Iterator[None]:
    mask, threads = os.umask(0o022), torch.get_num_threads()
    yield
    os.umask(mask)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_lane_outlives_its_test() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        left = [t for t in threading.enumerate() if t not in before and t.name.startswith("kvtcd-")]
        if not left:
            return
        gc.collect()
        time.sleep(0.01)
    pytest.fail(f"threads left running: {left}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let what a test draws depend on its name alone, not on the tests before it."""
    torch.manual_seed(zlib.crc32(f"setup of {item.nodeid}".encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Let it not depend on whether this test was the one that the fixtures of its module were made for."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
