"""The commands that README and the pages of docs/ show. A block of them is run by tests/e2e/test_commands.py, unless the line
before it names the test that runs them, or says why none does:

<!-- run by tests/e2e/test_operations.py -->
<!-- not run: needs Docker -->

A test that is named, or several, either read the commands from the page (`commands_of`), or name all that makes them up
(`missing_in`).
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import shlex
import urllib.parse
from collections.abc import Iterator, Sequence
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

    @property
    def tests(self) -> list[pathlib.Path]:
        """That run it, or that the reason why none does names."""
        return [ROOT / name for name in re.findall(r"tests/[\w/]+(?:\.py)?", self.mark)]


def blocks_of(page: pathlib.Path) -> list[Block]:
    """Those that begin with a command; others are drawings and messages."""
    found = []
    for mark, language, text in _FENCED.findall(page.read_text(encoding="utf-8")):
        text = _HOST.sub("", text).replace(".venv/bin/", "")
        if language in ("", "sh") and text.split(maxsplit=1)[0] in _PROGRAMS:
            found.append(Block(mark, list(_commands(text)) if not mark.startswith("not run") else []))
    return found


def commands_of(page: str, test: str) -> list[list[str]]:
    """Those that a page says are run by this test."""
    return [words for block in blocks_of(ROOT / page) if ROOT / test in block.tests for words in block.commands]


def in_sentences(page: pathlib.Path) -> list[list[str]]:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    found = [re.sub(r"^(?:[A-Z_]+=\S+ )+|\.venv/bin/", "", code) for code in re.findall(r"`([^`\n]+)`", text)]
    return [shlex.split(code) for code in found if re.match(r"(?:kvrelay|make|pip|python|curl) ", code)]


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


# Whether a test runs a command


def missing_in(tests: Sequence[pathlib.Path], page: pathlib.Path, words: Sequence[str]) -> set[str]:
    """What makes up a command of a page and is not named in its tests: the command and its options, or the path, headers and
    fields that curl sends."""
    named = {name for test in tests for name in _named(ast.parse(test.read_text(encoding="utf-8")))}
    reads_it = {"commands_of", page.relative_to(ROOT).as_posix()} <= named
    return set() if reads_it else set(_parts(words)) - named


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                yield text.partition("=")[0].lower()
            case ast.keyword(arg=str(name)) | ast.Call(func=ast.Name(id=name)):
                yield name
            case ast.Attribute(attr=name) if name.isupper():  # signal.SIGKILL
                yield name


def _parts(words: Sequence[str]) -> Iterator[str]:
    match words:
        case ["curl", *rest]:
            for before, word in zip(words, rest, strict=False):
                if before == "-d":
                    yield from json.loads(word)
                elif before == "-H":
                    yield from {word.partition(":")[0].lower()} - {"content-type"}
                elif "/" in word:
                    yield urllib.parse.urlsplit(word if "//" in word else f"//{word}").path
        case ["kill", "-9", *_]:
            yield "SIGKILL"
        case ["python", "-m", module, *rest]:
            yield module
            yield from _options(rest)
        case ["kvrelay", command, *rest]:
            yield command
            yield from _options(rest)
        case [program, *rest]:
            yield program
            yield from _options(rest)


def _options(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.lstrip("[").startswith("--"):
            yield word.strip("[]").partition("=")[0]
