"""The version of the installed package."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("kvrelay")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0.0.0+source"
