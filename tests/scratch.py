"""Folders that live as long as the tests do."""

from __future__ import annotations

import atexit
import pathlib
import tempfile


def scratch_folder(prefix: str) -> pathlib.Path:
    """Removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return pathlib.Path(folder.name)
