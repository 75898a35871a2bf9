"""What any machine needs: Python, libraries, memory, a compiler, a place for models, a free port."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
import socket
import sys

import zmq

from kvrelay.cli.doctor.finding import Checks, Finding, Grade
from kvrelay.cli.doctor.host import check_card_transports
from kvrelay.config import Environment, ModelOptions
from kvrelay.kernels.native import prebuilt
from kvrelay.native.compiler import find_compiler

_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "llguidance", "msgspec", "pyzmq", "uvicorn", "uvloop")
_MINIMUM_PYTHON = (3, 11)
_NEEDED_MEMORY_BYTES = 2 << 30
_NEEDED_DISK_BYTES = 1 << 30


def machine_checks(environment: Environment, port: int) -> Checks:
    return {
        "python": check_python,
        "libraries": check_libraries,
        "cpu": check_cpu,
        "memory": check_memory,
        "gpu": check_gpu,
        "gpu transports": check_card_transports,
        "compiler": lambda: check_compiler(environment),
        "cache folder": lambda: check_cache(environment.cache_dir),
        "default model": lambda: check_model(environment),
        "port": lambda: check_port(port),
        "encryption": check_curve,
    }


def check_python() -> Finding:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.version_info[:2] < _MINIMUM_PYTHON:
        return Finding(Grade.FAIL, found, "use Python 3.11 or newer")
    return Finding(Grade.OK, found)


def check_libraries() -> Finding:
    missing = []
    versions = []
    for name in _LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(Grade.FAIL, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding(Grade.OK, ", ".join(versions))


def check_cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    features = _cpu_features() & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve"}
    found = f"{cores} cores, {platform.machine()} {' '.join(sorted(features))}".rstrip()
    if cores < 2:
        return Finding(Grade.WARN, found, "with one core the router and the worker take turns; use two or more")
    return Finding(Grade.OK, found)


def _cpu_features() -> set[str]:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    lines = [line for line in text.splitlines() if line.lower().startswith(("flags", "features"))]
    return set(lines[0].partition(":")[2].split()) if lines else set()


def check_memory() -> Finding:
    try:
        fields = dict(line.split(":", 1) for line in pathlib.Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return Finding(Grade.WARN, "unknown", "make sure that 2 GB are free")
    found = f"{available / 1e9:.1f} GB available"
    if available < _NEEDED_MEMORY_BYTES:
        return Finding(Grade.WARN, found, "free some memory, or use a smaller model and --kv-blocks")
    return Finding(Grade.OK, found)


def check_gpu() -> Finding:
    """Without importing torch, which takes seconds: the driver's own tool says what is there."""
    if shutil.which("nvidia-smi") is None:
        return Finding(Grade.OK, "none; models run on the CPU")
    return Finding(Grade.OK, "NVIDIA driver found; use --device cuda")


def check_compiler(environment: Environment) -> Finding:
    if not environment.native_kernels:
        return Finding(Grade.WARN, "native kernels are switched off", "unset KVRELAY_NATIVE")
    if (brought := prebuilt.find()) is not None:
        return Finding(Grade.OK, f"not needed: the package brings {brought.stem}")
    compiler = find_compiler()
    if compiler is None:
        return Finding(Grade.WARN, "no C compiler", "install gcc or clang: native CPU kernels are faster than torch's")
    return Finding(Grade.OK, compiler)


def check_cache(folder: pathlib.Path) -> Finding:
    existing = next((place for place in (folder, *folder.parents) if place.exists()), pathlib.Path("/"))
    if not os.access(existing, os.W_OK):
        return Finding(Grade.FAIL, f"{folder} cannot be written", "set KVRELAY_CACHE to a folder of your own")
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {free / 1e9:.1f} GB free"
    if free < _NEEDED_DISK_BYTES:
        return Finding(Grade.WARN, found, "free some disk space, or set KVRELAY_CACHE to another disk")
    return Finding(Grade.OK, found)


def check_model(environment: Environment) -> Finding:
    name = ModelOptions().model
    if any((environment.cache_dir / "models").glob(f"{name}-*/*.safetensors")):
        return Finding(Grade.OK, f"{name} is there")
    if environment.offline:
        return Finding(Grade.FAIL, f"{name} is not there, and downloads are switched off", "unset KVRELAY_OFFLINE once")
    return Finding(Grade.OK, f"{name} will be fetched on first use")


def check_port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return Finding(Grade.WARN, f"{port} cannot be used: {reason}", "choose another with --port")
    return Finding(Grade.OK, f"{port} is free")


def check_curve() -> Finding:
    if not zmq.has("curve"):
        return Finding(Grade.WARN, "ZMQ was built without CURVE", "pip install --force-reinstall pyzmq")
    return Finding(Grade.OK, f"ZMQ {zmq.zmq_version()} with CURVE")
