"""The package as others get it: wheel and sdist are well-formed, and a wheel brings kernels for machines without a compiler."""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from kvrelay.kernels.native import prebuilt
from kvrelay.kernels.native.build import COMPILERS
from kvrelay.native.compile import load_native
from kvrelay.router import block_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = """
import torch
import kvrelay
from kvrelay.config import read_environment
from kvrelay.kernels import ranks
from kvrelay.kernels.choose import choose_kernels
from kvrelay.native import hashing
from kvrelay.router import block_table
from kvrelay.runner import host_pool
from kvrelay.transfer import copy
from kvrelay.transfer.engines import ranges
kernels = choose_kernels(torch.device("cpu"), torch.float32, read_environment())
print(kvrelay.__file__, type(kernels).__name__, sep="\\n")
assert block_table._library() and ranks.shared_functions() and ranges.native_ranges()
assert hashing._hash_blocks() is not hashing._hash_by_hashlib
assert copy._best_copy() is not copy._copy_by_ctypes
assert host_pool._best_copy() is not host_pool._copy_by_numpy
"""


def test_the_best_variant_that_the_processor_can_run_is_chosen(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    avx512, avx2 = prebuilt._AVX512, prebuilt._AVX2

    def found(features: frozenset[str]) -> str | None:
        path = prebuilt.find(tmp_path, features)
        return None if path is None else path.stem

    assert found(avx512) is None
    for name in ("plain", "avx2", "avx512", "avx512_vnni", "amx"):
        (tmp_path / f"kernels-x86_64-{name}.so").touch()
    assert found(frozenset({"sse2"})) == "kernels-x86_64-plain"
    assert found(avx2) == "kernels-x86_64-avx2"
    assert found(avx2 | {"avx512f"}) == "kernels-x86_64-avx2"  # not all of it
    assert found(avx512) == "kernels-x86_64-avx512"
    assert found(avx512 | {"avx512_vnni"}) == "kernels-x86_64-avx512_vnni"
    assert found(avx512 | {"avx512_vnni", "amx_tile", "amx_bf16"}) == "kernels-x86_64-amx"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert found(avx512) is None


def test_without_a_compiler_and_without_a_wheels_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert load_native(block_table.__file__) is None


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy, in which builds may leave what they like."""
    copy = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "kvrelay", copy / "kvrelay", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def made(sources: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel and an sdist."""
    out = tmp_path_factory.mktemp("made")
    for hook in ("build_sdist", "build_wheel"):
        command = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
        subprocess.run([sys.executable, "-c", command], cwd=sources, check=True, capture_output=True)
    return out


@pytest.mark.long
def test_the_index_would_take_wheel_and_sdist(made: pathlib.Path) -> None:
    files = sorted(map(str, made.iterdir()))
    assert len(files) == 2
    result = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    (archive,) = made.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert {"setup.py", "kvrelay/kernels/native/linear.c", "kvrelay/kernels/native/common.h"} <= set(names)
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")
def test_an_installed_wheel_brings_all_native_code_and_compiles_nothing(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (wheel,) = made.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    installed, tools = tmp_path / "installed", tmp_path / "tools"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    sources = {path for path in installed.rglob("*.c") if path.parent.parts[-2:] != ("kernels", "native")}
    assert len(sources) >= 6
    assert {path for path in sources if not (path.parent / "built" / f"{path.stem}.so").exists()} == set()
    tools.mkdir()
    (tools / "cc").write_text(f"#!/bin/sh\n: > {tmp_path}/called\nexit 1\n")
    (tools / "cc").chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": str(installed), "KVRELAY_CACHE": str(tmp_path / "cache"), "PATH": str(tools)
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", KERNELS], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    place, kernels = result.stdout.split()
    assert pathlib.Path(place).is_relative_to(installed)
    assert kernels == "NativeKernels"
    assert not (tmp_path / "called").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.long
@pytest.mark.parametrize("tool", ["pip", "pipx"])
def test_it_can_be_installed_in_a_clean_environment(tool: str, sources: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From the package index, with all that it needs; then the command runs, whatever this interpreter has installed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "pip"], check=True, env=clean)
    pip, command = tmp_path / "pip/bin/python", tmp_path / "pip/bin/kvrelay"
    if tool == "pip":
        subprocess.run([pip, "-m", "pip", "install", "-q", "."], check=True, cwd=sources, env=clean)
    else:
        clean |= {
            "PIPX_HOME": str(tmp_path / "pipx"),
            "PIPX_BIN_DIR": str(tmp_path / "bin"),
            "PIPX_MAN_DIR": str(tmp_path / "man"),
        }
        subprocess.run([pip, "-m", "pip", "install", "-q", "pipx"], check=True, env=clean)
        subprocess.run([pip, "-m", "pipx", "install", "."], check=True, cwd=sources, env=clean)
        command = tmp_path / "bin/kvrelay"
    for words in (["version"], ["serve", "--help"], ["doctor", "--help"]):
        result = subprocess.run([command, *words], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
