"""tools/measure_code.py counts what it says."""

from __future__ import annotations

import subprocess
import sys

from tools.measure_code import ROOT, measure

SOURCES = {
    "p/__init__.py": "",
    "p/a.py": "from p import b\n\nclass A:\n    def f(self):\n        def g():\n            pass\n        return g\n",
    "p/b.py": "def f():\n    from .sub.c import X\n    return X\n",
    "p/sub/c.py": "import p.a\nfrom ..d import Y\nX = 1\n",
    "p/d.py": "async def f():\n" + "    pass\n" * 61 + "Y = 1\n",
}


def test_lines_functions_and_circles() -> None:
    measured = measure(SOURCES, "p")
    rows = measured.rows()
    assert (rows["lines"], rows["files"], rows["classes"], rows["functions"]) == (76, 5, 1, 4)
    assert (rows["files on the top level"], rows["longest file"]) == (4, "63 (d.py)")
    assert rows["longest function"] == "62 (d.py:f)"
    assert (rows["function length, median"], rows["function length, p95"]) == (3, 62)
    assert (rows["functions over 60 lines"], rows["classes over 300 lines"], rows["files over 400 lines"]) == (1, 0, 0)
    assert measured.circles == [["p.a", "p.b", "p.sub.c"]]
    assert measured.functions == {"a.py:A.f": 4, "a.py:A.f.g": 2, "b.py:f": 3, "d.py:f": 62}


def test_this_tree_is_measured_from_the_command_line() -> None:
    command = [sys.executable, "tools/measure_code.py", "--compare", "HEAD", "--package", "tools", "--names"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[0].split() == ["HEAD", "now"]
    assert any(line.startswith("import circles") for line in shown)
