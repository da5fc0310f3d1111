"""Chromium without a screen, as far as tests of the page need it, and axe-core to judge what it shows."""

from __future__ import annotations

import base64
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support.patience import PATIENCE_S

from kvtcd.lab.models import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PICTURES = Path(__file__).parents[2] / ".cache" / "page"
"""Where pictures are kept; git ignores it."""
_AXE = "axe-playwright-python==0.1.8"
"""The wheel that carries axe-core 4.12.1 (MPL-2.0). It is read as a zip file; Playwright is not needed."""
_AXE_SHA256 = "84494fec757e4710dc751c8d7a636e457f4532f08f85c86dc9070133fbff53bc"
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Go to an address in a page of its own, so that nothing is left of the one before."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(address)

    def one(self, selector: str) -> WebElement:
        """Return the element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Return what is to be read of an element, even if the page replaces it meanwhile."""
        while True:
            with suppress(StaleElementReferenceException):
                return self.one(selector).text

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def rows(self, holder: str) -> dict[str, list[list[float]]]:
        """Return the figures of a table, exactly: by the header of the row, cell by cell."""
        return self.run(
            """
            const rows = [...document.querySelectorAll(`#${arguments[0]} tbody tr`)];
            const numbers = (cell) => [...cell.querySelectorAll("data")].map((found) => Number(found.value));
            const named = (row) => [row.cells[0].firstChild.textContent, [...row.cells].map(numbers)];
            return Object.fromEntries(rows.map(named));
            """,
            holder,
        )  # fmt: skip

    def until(self, true: Callable[[], object]) -> None:
        """Wait until something is true; fail with what is shown when it does not become so."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if true():
                    return
            except StaleElementReferenceException:
                pass
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.1)

    def shows(self, selector: str, words: str) -> None:
        """Wait until an element has these words."""
        self.until(lambda: words in self.text(selector))

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def onward(self) -> None:
        """Go to what comes next by keyboard."""
        self.press(Keys.TAB)

    def back(self) -> None:
        """Go to what comes before by keyboard."""
        ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()

    def focused(self) -> str:
        """Return which element has the focus: its id, else its name."""
        return self.run("return document.activeElement.id || document.activeElement.localName")

    def screen(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Be a screen of this size and colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, name: str) -> None:
        """Keep a picture of the whole page."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot",
            {"captureBeyondViewport": True, "clip": {**size, "scale": 1}},
        )
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Return what the console has against the page since it was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def judged(self) -> list[str]:
        """Return what axe-core finds wrong with the page as it is now."""
        self.run(axe() + "; window.axe = axe;")
        found = self.driver.execute_async_script(
            "const [rules, done] = arguments;"
            "axe.run(document, {runOnly: rules, resultTypes: ['violations']}).then(done);",
            _RULES,
        )
        assert found["passes"], "nothing was looked at"
        return [
            f"{rule['id']} ({rule['impact']}): {rule['help']}: {node['html']} {node.get('failureSummary')}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]


def browser() -> Iterator[Browser]:
    """Start Chromium; skips where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = Options()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "lang=en"):
        options.add_argument(f"--{argument}")
    with tempfile.TemporaryDirectory(prefix="kvtcd-page-", ignore_cleanup_errors=True) as profile:
        options.add_argument(f"--user-data-dir={profile}")
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            driver.set_script_timeout(PATIENCE_S)
            yield Browser(driver)
        finally:
            driver.quit()


@functools.cache
def axe() -> str:
    """Return the source of axe-core, fetched once; skips the test where it cannot be had."""
    cache = cache_folder() / "axe.min.js"
    if not cache.exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _AXE]
            done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
            if done.returncode:
                pytest.skip(f"axe-core cannot be had: {done.stderr.strip()[-200:]}")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                source = archive.read("axe_playwright_python/axe.min.js")
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_bytes(source)
    source = cache.read_bytes()
    assert hashlib.sha256(source).hexdigest() == _AXE_SHA256, f"{cache} is not what was written down"
    return source.decode()
