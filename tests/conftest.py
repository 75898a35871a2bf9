"""Shared by all tests: helpers are importable by name, and nothing asks a hub for models."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent / "transfer")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KVRELAY_OFFLINE", "0")  # the default model may be fetched
if "PYTEST_XDIST_WORKER" in os.environ:  # a thread that spins while it waits takes the core of another process
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
with contextlib.suppress(ImportError):  # the tests for cards do without it
    import hypothesis

    hypothesis.settings.register_profile("patient", deadline=None)  # how long an example takes is the machine's doing
    hypothesis.settings.load_profile("patient")


LONG_TIMEOUT_S = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from order import turn

    items.sort(key=turn)
    for item in items:  # a guard against what hangs, not a measure of how busy a machine is
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Called only where several tests run beside each other."""
    from beside import Beside

    return Beside(config, log)


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
