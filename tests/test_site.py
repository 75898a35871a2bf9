"""The documentation site builds, strictly: a page outside of the navigation, a broken link or a missing anchor fails."""

from __future__ import annotations

import pathlib
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
    for name in ("architecture", "relay", "embedding_relay", "continuation", "vision", "events"):
        drawn = (tmp_path / name / "index.html").read_text(encoding="utf-8")
        assert '<svg class="drawing"' in drawn
        assert "sequenceDiagram" not in drawn
    assert 'src="http' not in page
    assert "fonts.googleapis" not in page
