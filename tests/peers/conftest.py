"""Tests against real serving frameworks. They have an environment of their own: `make test-peers`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

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
