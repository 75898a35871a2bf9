"""A headless Chromium for tests of the pages. Where the system has none, these tests are skipped by name."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from patience import PATIENCE_S
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs Debian's chromium and chromium-driver")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--force-device-scale-factor=1", "--disable-background-networking", "--disable-component-update", "--no-first-run",
    "--force-prefers-reduced-motion",  # else the map is painted again sixty times a second
    "--disable-features=BackForwardCache",  # else a page that was left keeps its feed for a minute
)  # fmt: skip

T = TypeVar("T")


class Browser:
    """One window."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        assert DRIVER is not None
        options = Options()
        options.binary_location = CHROMIUM
        for flag in _FLAGS:
            options.add_argument(flag)
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-browser-", ignore_cleanup_errors=True)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(DRIVER, env={**os.environ, "TMPDIR": self._folder.name})  # where Chromium leaves folders behind
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(PATIENCE_S)
        self.driver.set_page_load_timeout(PATIENCE_S)

    def close(self) -> None:
        self.driver.quit()
        self._folder.cleanup()

    def open(self, url: str, *, width: int = 1440, height: int = 1200) -> None:
        """Without what was kept of pages before."""
        self.size(width, height)
        self.driver.get(url)
        self.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.driver.get(url)
        self.problems()

    def size(self, width: int, height: int) -> None:
        """Of what is seen of the page. No window is as narrow as a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    @property
    def is_too_wide(self) -> bool:
        """Whether the page has to be scrolled sideways."""
        return bool(self.js("return document.documentElement.scrollWidth > innerWidth"))

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of all that it selects; empty if there is none."""
        script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent).join('\\n')"
        found: str = self.driver.execute_script(script, selector)
        return found

    def count(self, selector: str) -> int:
        return len(self.all(selector))

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Returns what the condition gives once that is true."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if found := condition():
                    return found
            except StaleElementReferenceException:
                pass
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain: {what}\n{self.text('body')[:3000]}\n{self.problems()}")
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        """Into whatever has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def tab_to(self, selector: str, *, most: int = 120) -> None:
        """With the Tab key alone."""
        for _ in range(most):
            if self.js("return document.activeElement.matches(arguments[0])", selector):
                return
            self.press(Keys.TAB)
        raise AssertionError(f"the Tab key does not lead to {selector}")

    def problems(self) -> list[str]:
        """What the browser complained about since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def browsing() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()
