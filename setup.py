"""Compiles the C kernels into a wheel, where there is a compiler: such a wheel is for one platform. Else it is for all of them,
and machines compile on first use. Everything else about the package is in pyproject.toml."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from kvrelay.kernels.native import build, prebuilt  # noqa: E402  these need nothing but Python
from kvrelay.native.compiler import FLAGS, find_compiler  # noqa: E402

KERNELS = ROOT / "kvrelay/kernels/native"  # for each kind of processor; other C files are the same for all


def compiler() -> str | None:
    return find_compiler() if sys.platform.startswith("linux") else None


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        found = compiler()
        if found is None or self.editable_mode:
            return
        target = pathlib.Path(self.build_lib)
        prebuilt.build([found, *build.FLAGS], sorted(KERNELS.glob("*.c")), target / KERNELS.relative_to(ROOT) / "built")
        for source in (ROOT / "kvrelay").rglob("*.c"):
            if source.parent != KERNELS:
                library = target / source.relative_to(ROOT).parent / "built" / f"{source.stem}.so"
                library.parent.mkdir(exist_ok=True)
                subprocess.run([found, *FLAGS, "-o", str(library), str(source)], check=True)


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel is for one platform."""
        return compiler() is not None


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """It holds no extension module of Python, so it is for every Python."""
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
