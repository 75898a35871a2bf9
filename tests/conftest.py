"""Shared by all tests: helpers are importable by name, and nothing asks a hub for models."""

from __future__ import annotations

import logging
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent / "transfer")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KVRELAY_OFFLINE", "0")  # the default model may be fetched


LONG_TIMEOUT_S = 1800

# Files that wait for processes and clocks, the longest first: beside them the rest, which only computes, fills the cores.
_FIRST = (
    "e2e/test_smollm2.py",
    "e2e/test_chaos.py",
    "contract/test_context_index.py",
    "e2e/",
    "launch/",
    "offline/",
    "worker/",
    "test_fuzz.py",
    "events/",
    "transfer/",
    "relay/",
    "router/",
    "cli/",
    "bench/",
    "discovery/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = pathlib.Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        name = item.path.relative_to(folder).as_posix() if item.path.is_relative_to(folder) else ""
        return next((index for index, prefix in enumerate(_FIRST) if name.startswith(prefix)), len(_FIRST))

    items.sort(key=turn)
    for item in items:  # a guard against what hangs, not a measure of how busy a machine is
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.fixture(autouse=True)
def _untouched_log() -> Iterator[None]:
    """A command that runs in this process sets up the log for good. The next test finds it as if none had: pytest adds
    its handler to loggers that do not propagate, and would then hear every line twice."""
    yield
    for name in ("kvrelay", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.filters[:], logger.propagate = [], [], True
        logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def contextpilot_python(pytestconfig: pytest.Config) -> pathlib.Path:
    """The interpreter of the environment that has the real ContextPilot. Making it takes a minute, once, and shows."""
    from contextpilot_server import install

    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return install(sys.stderr)
