"""Small C functions, compiled once per machine and loaded with ctypes.

The compiled file lives in the cache folder under a name made from everything that shaped it (source, flags, compiler,
processor), so another version never meets a stale one, and processes that start together may compile side by side: each
writes its own file and renames it into place. Without a compiler, some of them are found in the installed wheel.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from kvrelay.config import read_environment
from kvrelay.log import Log

_log = Log("native")
_COMPILE_TIMEOUT_S = 120.0


def compile_and_load(name: str, source: str, flags: Sequence[str] = ("-O2",)) -> ctypes.CDLL | None:
    """The library made from C `source`; None where native code is switched off or cannot be made: callers have another way."""
    environment = read_environment()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not environment.native_kernels:
        return None
    if compiler is None:
        return _brought(name)
    command = [compiler, "-shared", "-fPIC", "-x", "c", *flags]
    shaped_by = "\0".join([source, *command, platform.machine(), platform.node()])
    key = hashlib.sha256(shaped_by.encode()).hexdigest()[:16]
    library = environment.cache_dir / "native" / f"{name}-{key}.so"
    try:
        if not library.exists():
            _compile(command, source, library)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        _log.warning("could not compile native code", name=name, compiler=compiler, said=error.stderr.strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("could not make native code", name=name, error=error)
    return None


def _brought(name: str) -> ctypes.CDLL | None:
    """What the wheel brought, if it was made on a machine with a compiler (setup.py)."""
    library = pathlib.Path(__file__).parent / "built" / f"{name}.so"
    return ctypes.CDLL(str(library)) if library.exists() else None


def _compile(command: list[str], source: str, library: pathlib.Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        subprocess.run(
            [*command, "-o", made, "-"],
            input=source,
            text=True,
            capture_output=True,
            check=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        pathlib.Path(made).replace(library)
    finally:
        pathlib.Path(made).unlink(missing_ok=True)
