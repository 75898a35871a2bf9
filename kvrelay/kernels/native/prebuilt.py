"""C kernels that are compiled when a wheel is made: one library for each kind of processor.

    wheel      setup.py calls `build`: every variant of the machine it runs on, under kernels/native/built/
    run time   `find`: the best one that this processor has all features for. Nothing is compiled then

Nothing here needs a package that is not in Python itself: setup.py runs before any is installed.
"""

from __future__ import annotations

import pathlib
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

FOLDER = pathlib.Path(__file__).parent / "built"
_COMPILE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Variant:
    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]  # features, as /proc/cpuinfo calls them


_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VARIANTS: dict[str, list[Variant]] = {  # by machine, the best first
    "x86_64": [
        Variant(
            "amx",
            ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
            _AVX512 | {"avx512_vnni", "amx_tile", "amx_bf16"},
        ),
        Variant("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
        Variant("avx512", ("-march=x86-64-v4",), _AVX512),
        Variant("avx2", ("-march=x86-64-v3",), _AVX2),
        Variant("plain", (), frozenset()),
    ],
    "aarch64": [
        Variant("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
        Variant("plain", (), frozenset()),
    ],
}


def build(command: Sequence[str], sources: Sequence[pathlib.Path], target: pathlib.Path) -> list[pathlib.Path]:
    """`command` is the compiler with its flags. What it cannot make (an old compiler may not know a processor) is left out."""
    target.mkdir(parents=True, exist_ok=True)
    made: list[pathlib.Path] = []
    for variant in VARIANTS.get(platform.machine(), []):
        path = target / _file_name(variant)
        words = [*command, *variant.flags, "-o", str(path), *map(str, sources), "-lm"]
        if subprocess.run(words, timeout=_COMPILE_TIMEOUT_S, check=False, capture_output=True).returncode == 0:
            made.append(path)
    return made


def find(folder: pathlib.Path = FOLDER, features: frozenset[str] | None = None) -> pathlib.Path | None:
    """None where this installation has none for this processor."""
    has = _features() if features is None else features
    for variant in VARIANTS.get(platform.machine(), []):
        path = folder / _file_name(variant)
        if variant.needs <= has and path.exists():
            return path
    return None


def _file_name(variant: Variant) -> str:
    return f"kernels-{platform.machine()}-{variant.name}.so"


def _features() -> frozenset[str]:
    """Of the first processor."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()
