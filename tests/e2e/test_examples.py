"""Every example runs as its readers run it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from contextpilot_server import contextpilot
from patience import PATIENCE_S
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
    result = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", AGAINST_A_SERVER)
def test_an_example_against_the_server(smol: Server, name: str) -> None:
    assert run(name, smol.url + "/v1").strip()


@pytest.mark.parametrize("name", WITHOUT)
def test_an_example_without_a_server(name: str) -> None:
    assert run(name).strip()


def test_the_example_with_a_context_index(smol: Server, contextpilot_python: pathlib.Path) -> None:
    with contextpilot(contextpilot_python, infer_url=smol.url) as index:
        assert "the index lists 3 requests" in run(WITH_AN_INDEX, index.url)


def test_the_example_with_a_context_index_says_that_there_is_none() -> None:
    command = [sys.executable, str(FOLDER / WITH_AN_INDEX), "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert ended.stderr.startswith("no ContextPilot server answers at http://127.0.0.1:9")
    assert "Traceback" not in ended.stderr


def test_the_example_with_images() -> None:
    first, second = (line.split(" encoded by ") for line in run(WITH_ITS_OWN_SERVER).splitlines())
    assert first[0] == second[0]
    assert first[1].startswith("encode-")
    assert second[1] in (first[1], "cached")  # depending on when the router hears of the cache
