"""Every example runs, and says something. Those that need a server share one, and run in this process."""

from __future__ import annotations

import contextlib
import io
import pathlib
import runpy
import subprocess
import sys
from unittest import mock

import pytest
from contextpilot_server import contextpilot
from prepared import popen
from server import Server

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"
WITH_AN_INDEX = "contextpilot.py"
WITH_ITS_OWN_SERVER = "vision.py"
AGAINST_A_SERVER = sorted(
    path.name
    for path in FOLDER.glob("*.py")
    if not path.name.startswith("offline") and path.name not in (WITH_AN_INDEX, WITH_ITS_OWN_SERVER)
)
WITHOUT = sorted(path.name for path in FOLDER.glob("offline*.py"))


def run(name: str, *arguments: str) -> str:
    """In a process of its own; what it printed."""
    process = popen([sys.executable, str(FOLDER / name), *arguments], stdout=subprocess.PIPE, text=True)
    with process.stdout as output:
        printed: str = output.read()
    assert process.wait(200) == 0, printed
    return printed


def run_here(name: str, *arguments: str) -> str:
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [name, *arguments]), contextlib.redirect_stdout(printed):
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", AGAINST_A_SERVER)
def test_an_example_against_the_server(smol: Server, name: str) -> None:
    assert run_here(name, smol.url + "/v1").strip()


@pytest.mark.parametrize("name", WITHOUT)
def test_an_example_without_a_server(name: str) -> None:
    assert run(name).strip()


def test_the_example_with_a_context_index(smol: Server, contextpilot_python: pathlib.Path) -> None:
    with contextpilot(contextpilot_python, infer_url=smol.url) as index:
        assert "the index lists 3 requests" in run_here(WITH_AN_INDEX, index.url)


def test_the_example_with_a_context_index_says_that_there_is_none() -> None:
    command = [sys.executable, str(FOLDER / WITH_AN_INDEX), "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("no ContextPilot server answers at http://127.0.0.1:9")
    assert "Traceback" not in ended.stderr


def test_the_example_with_images() -> None:
    first, second = (line.split(" encoded by ") for line in run(WITH_ITS_OWN_SERVER).splitlines())
    assert first[0] == second[0]
    assert first[1].startswith("encode-")
    assert second[1] in (first[1], "cached")  # depending on when the router hears of the cache
