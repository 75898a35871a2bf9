"""Every block of commands in README and docs/ is run by a test, or says why not; every command in a sentence is one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import commands
import documented
import pytest

from kvrelay.cli import main as cli

EXTRAS = tomllib.loads((commands.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("path", commands.PAGES, ids=lambda path: path.name)
def test_every_block_of_commands_is_run_or_says_why_not(path: Path) -> None:
    """By tests/e2e/test_commands.py if it says nothing."""
    for block in commands.blocks_of(path):
        assert not block.mark or re.fullmatch(r"run by tests/\S+\.py(, tests/\S+\.py)*|not run: \S.*", block.mark), block.mark
        assert [test for test in block.tests if not test.exists()] == []
        for words in block.commands:
            if block.is_run_here:
                assert words[0] in ("kvrelay", "curl") or words[:2] == ["make", "serve"], f"neither run nor marked: {words}"
                if words[0] == "kvrelay":
                    accept(words[1:])
            else:
                assert commands.missing_in(block.tests, path, words) == set(), f"{block.mark}: {words}"


@pytest.mark.parametrize("path", commands.PAGES, ids=lambda path: path.name)
def test_every_command_in_a_sentence_is_one(path: Path) -> None:
    for words in commands.in_sentences(path):
        match words:
            case ["kvrelay", *arguments]:
                accept(arguments)
            case ["make", *targets]:
                subprocess.run(["make", "-n", *targets], cwd=commands.ROOT, check=True, capture_output=True)
            case ["pip", "install" | "wheel", what]:
                assert set(re.findall(r"\[(.*)\]", what)) <= set(EXTRAS), words
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module), words
            case ["python", script]:
                assert (commands.ROOT / script).exists(), words
            case _:
                raise AssertionError(f"not looked at: {words}")


def accept(arguments: list[str]) -> None:
    """Raises ConfigError for what the command line does not know. A command alone is its name."""
    if arguments in [[name] for name in cli.COMMANDS]:
        return
    num_words = 2 if arguments[0] == "bench" else 1
    command, options = " ".join(arguments[:num_words]), [word for word in arguments[num_words:] if word != "--help"]
    assert command in (*documented.COMMANDS, "bench compare"), arguments
    if options and command in documented.COMMANDS:
        documented.parser_of(command).parse_strictly(options)
