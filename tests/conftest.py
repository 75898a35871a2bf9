"""Shared by all tests: helpers are importable by name, and nothing asks a hub for models."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KVRELAY_OFFLINE", "0")  # the default model may be fetched


# Tests of these start no processes that others could slow down, and wait for no clock.
_BESIDE = (
    "checkpoint/",
    "contract/test_kernels.py",
    "contract/test_runner.py",
    "engine/",
    "frontend/",
    "kernels/",
    "media/",
    "models/",
    "runner/",
    "text/",
    "test_beam_parity.py",
    "test_continuation_parity.py",
    "test_docs.py",
    "test_hashing.py",
    "test_parity.py",
    "test_resume_parity.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = pathlib.Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder) and item.path.relative_to(folder).as_posix().startswith(_BESIDE):
            item.add_marker(pytest.mark.beside)


@pytest.fixture(scope="session")
def contextpilot_python(pytestconfig: pytest.Config) -> pathlib.Path:
    """The interpreter of the environment that has the real ContextPilot. Making it takes a minute, once, and shows."""
    from contextpilot_server import install

    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return install(sys.stderr)
