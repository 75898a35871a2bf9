"""A command of `kvrelay` in this process, and what it printed: an interpreter takes longer to start than most commands run."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from unittest import mock

from kvrelay.cli.main import main


def run(*argv: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """`said` is its standard input."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "stdin", io.StringIO(said)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = main(argv)
        except SystemExit as ended:  # --help
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(argv, status, out.getvalue(), err.getvalue())
