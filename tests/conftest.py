"""Shared by all tests: helpers are importable by name, and nothing asks a hub for models."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KVRELAY_OFFLINE", "0")  # the default model may be fetched


@pytest.fixture(scope="session")
def contextpilot_python(pytestconfig: pytest.Config) -> pathlib.Path:
    """The interpreter of the environment that has the real ContextPilot. Making it takes a minute, once, and shows."""
    from contextpilot_server import install

    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return install(sys.stderr)
