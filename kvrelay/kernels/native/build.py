"""Loads the C kernels: those that the wheel brought for this kind of processor (prebuilt.py), else compiled on first use:

1. The name of the library is a digest of sources, flags, compiler and processor, so a cached one always fits: machines that
   share a cache folder each find the library for their own kind (AVX-512, AVX2, NEON, or plain C).
2. Not cached: compiled under a lock (two workers that start at once compile once), into a temporary name, then renamed, so
   that a half-written library is never seen.
3. Loaded with ctypes, which lets other Python threads run during a call.
4. The library is linked to no OpenMP runtime: it is handed the one that torch has loaded, so there is one pool of threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvrelay.kernels.native import prebuilt
from kvrelay.native.compiler import COMPILERS, find_compiler

_FOLDER = pathlib.Path(__file__).parent
# Contracting a * b + c, or reordering sums, would make a row's result depend on its batch. Scheduling before registers are
# assigned makes GCC copy accumulators in the innermost loops, which costs a fifth of the speed.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-schedule-insns", "-fvisibility=hidden", "-fPIC", "-shared")
_THIS_PROCESSOR = ("-march=native",)
_WITHOUT_TILES = ("-mno-amx-tile", "-mno-amx-bf16")  # which the compiler may know and the assembler not
_COMPILE_TIMEOUT_S = 180.0
_RUNTIMES = ("libgomp", "libiomp5", "libomp")  # all of them export GOMP_parallel


class KernelsUnavailableError(Exception):
    """Why there are no native kernels here. Never leaves this package: the reference kernels serve instead."""


def load_library(
    cache_dir: pathlib.Path, compilers: Sequence[str] = COMPILERS, processor: Sequence[str] = _THIS_PROCESSOR
) -> ctypes.CDLL:
    """The compiled kernels, ready to be called. Compiling takes a few seconds, once. `processor` is what the compiler is told
    of it: by default to use all that this one has."""
    if not sys.platform.startswith("linux"):
        raise KernelsUnavailableError(f"they are built on Linux only, not on {sys.platform}")
    runtime = _loaded_openmp()
    library = _library(cache_dir, compilers, processor)
    try:
        functions = (runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads)
    except AttributeError as error:
        raise KernelsUnavailableError(f"torch's OpenMP runtime lacks a function: {error}") from error
    library.use_openmp.argtypes = (ctypes.c_void_p,) * 3
    library.use_openmp(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    return library


def _library(cache_dir: pathlib.Path, compilers: Sequence[str], processor: Sequence[str]) -> ctypes.CDLL:
    brought = prebuilt.find()
    if brought is not None and processor == _THIS_PROCESSOR:
        with suppress(OSError):  # made for another C library
            return ctypes.CDLL(str(brought))
    compiler = find_compiler(compilers)
    if compiler is None:
        raise KernelsUnavailableError(f"there is no C compiler on PATH (looked for {', '.join(compilers)})")
    return _cached_library(cache_dir / "kernels", compiler, processor)


def _cached_library(folder: pathlib.Path, compiler: str, processor: Sequence[str]) -> ctypes.CDLL:
    name = f"kernels-{_digest(compiler, processor)}.so"
    with _writable(folder) as place, _locked(place / "lock"):
        path = place / name
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # damaged, by a full disk say
                path.unlink()
        _compile(compiler, processor, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailableError(f"the compiled library cannot be loaded: {error}") from error


@contextmanager
def _writable(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The cache folder, or one that lives only until the library is loaded."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if usable:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kvrelay-kernels-") as temporary:
        yield pathlib.Path(temporary)


@contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, processor: Sequence[str], path: pathlib.Path) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    sources = [str(source) for source in sorted(_FOLDER.glob("*.c"))]
    try:
        for known in (processor, (*processor, *_WITHOUT_TILES), ()):
            command = [compiler, *FLAGS, *known, "-o", str(temporary), *sources, "-lm"]
            result = _run(command)
            if result.returncode == 0:
                temporary.replace(path)
                return
    finally:
        temporary.unlink(missing_ok=True)
    lines = (result.stderr or result.stdout).strip().splitlines()
    raise KernelsUnavailableError(
        f"{compiler} failed: {next((line for line in lines if 'error' in line), ' '.join(lines[-1:]))}"
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{command[0]} did not run: {error}") from error


def _digest(compiler: str, processor: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted([*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for fact in (*FLAGS, *processor, _run([compiler, "--version"]).stdout, platform.machine(), _processor()):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What `-march=native` depends on: the first processor's model and features."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    wanted = re.compile(r"^(flags|Features|model|model name|cpu family|vendor_id|CPU \w+)\s*:.*$", re.MULTILINE)
    return "\n".join(sorted({match.group(0) for match in wanted.finditer(text)}))


def _loaded_openmp() -> ctypes.CDLL:
    """The OpenMP runtime that is in this process already, which torch brought."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()}
    for runtime in _RUNTIMES:
        for path in sorted(paths):
            if pathlib.PurePath(path).name.startswith(runtime):
                return ctypes.CDLL(path)
    raise KernelsUnavailableError("torch has loaded no OpenMP runtime")
