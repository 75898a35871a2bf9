"""The documentation site builds, strictly: a page outside of the navigation, a broken link or a missing anchor fails."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_site_builds_and_asks_no_outside_host(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "messages" / "index.html").read_text(encoding="utf-8")
    assert "StepOutputs" in page
    assert "TRANSFERRING" in (tmp_path / "reference" / "states" / "index.html").read_text(encoding="utf-8")
    assert "/v1/chat/completions" in (tmp_path / "reference" / "endpoints" / "index.html").read_text(encoding="utf-8")
    with_drawings = [page for page in (ROOT / "docs").glob("*.md") if "```mermaid" in page.read_text(encoding="utf-8")]
    assert len(with_drawings) > 10
    for drawn in ((tmp_path / page.stem / "index.html").read_text(encoding="utf-8") for page in with_drawings):
        assert '<svg class="drawing"' in drawn
        assert not re.search("sequenceDiagram|stateDiagram|flowchart TB|```", drawn)
    assert 'src="http' not in page
    assert "fonts.googleapis" not in page
