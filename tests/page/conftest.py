"""A browser, and a daemon for it to look at, for all tests of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import browser as browsers
from support import site as sites

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def browser() -> Iterator[browsers.Browser]:
    yield from browsers.browser()


@pytest.fixture(scope="session")
def site(browser: browsers.Browser) -> Iterator[sites.Site]:  # noqa: ARG001 - no daemon where there is no browser
    with sites.running() as site:
        yield site


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where pictures are."""
    if browsers.PICTURES.exists():
        terminalreporter.write_line(f"pictures of the page: {browsers.PICTURES}")


@pytest.fixture(autouse=True)
def _on_a_desk(browser: browsers.Browser) -> None:
    browser.screen(1280)
