"""This machine's C compiler. setup.py asks for it too, so nothing here needs a package that is not in Python itself."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-shared", "-fPIC", "-O3")  # of C functions that are the same for every processor


def find_compiler(names: Sequence[str] = COMPILERS) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)
