"""The commands that README and the pages of docs/ show. A block of them is run by tests/e2e/test_commands.py, unless the line
before it names the test that runs them, or says why none does:

<!-- run by tests/e2e/test_operations.py -->
<!-- not run: needs Docker -->
"""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = {"kvrelay", "make", "curl", "docker", "kubectl", "pip", "python", "cp", "mkdir", "prometheus"}
_HOST = re.compile(r"^host-\d+\$ ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    mark: str  # of the line before it
    commands: list[list[str]]  # their words

    @property
    def is_run_here(self) -> bool:
        return not self.mark


def blocks_of(page: pathlib.Path) -> list[Block]:
    """Those that begin with a command; others are drawings and messages."""
    found = []
    for mark, language, text in _FENCED.findall(page.read_text(encoding="utf-8")):
        text = _HOST.sub("", text).replace(".venv/bin/", "")
        if language in ("", "sh") and text.split(maxsplit=1)[0] in _PROGRAMS:
            found.append(Block(mark, list(_commands(text)) if not mark else []))
    return found


def _commands(text: str) -> Iterator[list[str]]:
    """A command goes on in the next line after a backslash and inside of quotes."""
    begun = ""
    for line in text.splitlines():
        begun = f"{begun}\n{line}" if begun else line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # an open quote
            continue
        begun = ""
        if words:
            yield words
    assert not begun, begun
