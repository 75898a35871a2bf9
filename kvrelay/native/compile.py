"""Small C functions, each in a file beside the module that calls them, loaded with ctypes.

    wheel     of one platform: setup.py has compiled every file, and each library lies in `built` beside its source
    else      compiled once per machine, into the cache folder, under a name made from everything that shaped it (source,
              compiler, processor): another version never meets a stale one, and processes that start together may compile side
              by side, since each writes its own file and renames it into place

No processor needs a library of its own: most of these functions wait for memory, and hashing asks at run time what the
processor has.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import platform
import subprocess
import tempfile

from kvrelay.config import read_environment
from kvrelay.log import Log
from kvrelay.native.compiler import FLAGS, find_compiler

_log = Log("native")
_COMPILE_TIMEOUT_S = 120.0


def load_native(module: str) -> ctypes.CDLL | None:
    """The library made from the C file beside `module`, a `__file__`; None where native code is switched off or cannot be made:
    callers have another way."""
    environment, source = read_environment(), pathlib.Path(module).with_suffix(".c")
    if not environment.native_kernels:
        return None
    return _brought(source) or _compiled(source, environment.cache_dir / "native")


def _brought(source: pathlib.Path) -> ctypes.CDLL | None:
    """What the wheel brought. One that was made for another C library cannot be loaded."""
    library = source.parent / "built" / f"{source.stem}.so"  # beside its module, Python would take it for that
    try:
        return ctypes.CDLL(str(library)) if library.exists() else None
    except OSError as error:
        _log.warning("could not load native code of the package", name=source.stem, error=error)
        return None


def _compiled(source: pathlib.Path, cache: pathlib.Path) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    shaped_by = "\0".join([source.read_text(encoding="utf-8"), compiler, *FLAGS, platform.machine(), platform.node()])
    key = hashlib.sha256(shaped_by.encode()).hexdigest()[:16]
    library = cache / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        _log.warning("could not compile native code", name=source.stem, compiler=compiler, said=error.stderr.strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("could not make native code", name=source.stem, error=error)
    return None


def _compile(compiler: str, source: pathlib.Path, library: pathlib.Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        subprocess.run(
            [compiler, *FLAGS, "-o", made, str(source)],
            text=True,
            capture_output=True,
            check=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        pathlib.Path(made).replace(library)
    finally:
        pathlib.Path(made).unlink(missing_ok=True)
