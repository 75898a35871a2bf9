"""Shared by all tests: helpers are importable by name, and nothing asks a hub for models."""

from __future__ import annotations

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KVRELAY_OFFLINE", "0")  # the default model may be fetched
