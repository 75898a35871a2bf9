"""The documentation site builds, strictly: a page outside of the navigation, a broken link or a missing anchor fails."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from browser import Browser, needs_chromium

ROOT = pathlib.Path(__file__).resolve().parent.parent
DRAWN = [page.stem for page in sorted((ROOT / "docs").glob("*.md")) if "```mermaid" in page.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


def test_the_site_asks_no_outside_host(site: pathlib.Path) -> None:
    page = (site / "reference" / "messages" / "index.html").read_text(encoding="utf-8")
    assert "StepOutputs" in page
    assert "TRANSFERRING" in (site / "reference" / "states" / "index.html").read_text(encoding="utf-8")
    assert "/v1/chat/completions" in (site / "reference" / "endpoints" / "index.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert "fonts.googleapis" not in page


def test_drawings_are_drawn(site: pathlib.Path) -> None:
    assert len(DRAWN) > 10
    for name in DRAWN:
        page = (site / name / "index.html").read_text(encoding="utf-8")
        assert '<svg class="drawing"' in page
        assert not re.search("sequenceDiagram|stateDiagram|flowchart TB|```", page)


@needs_chromium
def test_drawings_can_be_read_on_a_phone(site: pathlib.Path, browser: Browser) -> None:
    """Their words are at least 9 pixels high, and no page has to be moved sideways."""
    drawings = "[...document.querySelectorAll('svg.drawing')]"
    scale = f"return {drawings}.map(one => one.getBoundingClientRect().width / one.viewBox.baseVal.width)"
    for name in DRAWN:
        browser.open((site / name / "index.html").as_uri(), width=390, height=844)
        assert not browser.is_too_wide, name
        assert min(browser.js(scale)) * 13 >= 9, name
