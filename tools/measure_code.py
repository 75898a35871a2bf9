"""Measures the source: how much there is, how it is cut, and whether imports run in circles. Needs nothing but Python and git.

    python tools/measure_code.py                      kvrelay/ as it is in this folder
    python tools/measure_code.py --compare 4905ec1    the same of another commit beside it
    python tools/measure_code.py --names              also which functions, classes and files are over their limits

Lines are all lines of a file. A function's length runs from `def` to its last line, decorators not counted; methods and nested
functions are functions. A circle is a set of modules each of which imports, directly or by way of others, all the rest; an
import inside a function or under `if TYPE_CHECKING` counts as much as one at the top of a file.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUNCTION_LINES, CLASS_LINES, FILE_LINES = 60, 300, 400


@dataclass
class Measured:
    """Of one tree. Lengths by name."""

    files: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    circles: list[list[str]] = field(default_factory=list)
    top_level: int = 0

    def rows(self) -> dict[str, int | str]:
        return {
            "lines": sum(self.files.values()),
            "files": len(self.files),
            "classes": len(self.classes),
            "functions": len(self.functions),
            "files on the top level": self.top_level,
            "longest file": longest(self.files),
            "longest class": longest(self.classes),
            "longest function": longest(self.functions),
            "function length, median": percentile(list(self.functions.values()), 50),
            "function length, p95": percentile(list(self.functions.values()), 95),
            f"functions over {FUNCTION_LINES} lines": len(over(self.functions, FUNCTION_LINES)),
            f"classes over {CLASS_LINES} lines": len(over(self.classes, CLASS_LINES)),
            f"files over {FILE_LINES} lines": len(over(self.files, FILE_LINES)),
            "import circles": len(self.circles),
        }

    def names(self) -> Iterator[str]:
        for what, sizes, limit in (
            ("function", self.functions, FUNCTION_LINES),
            ("class", self.classes, CLASS_LINES),
            ("file", self.files, FILE_LINES),
        ):
            yield from (f"{what} over {limit} lines: {name} ({size})" for name, size in over(sizes, limit))
        yield from (f"import circle: {', '.join(circle)}" for circle in self.circles)


def longest(sizes: Mapping[str, int]) -> str:
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    return f"{size} ({name})" if name else "0"


def over(sizes: Mapping[str, int], limit: int) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in sizes.items() if size > limit), key=lambda item: -item[1])


def percentile(sizes: list[int], share: int) -> int:
    """The smallest that at least `share` % do not exceed."""
    return sorted(sizes)[max(0, -(-len(sizes) * share // 100) - 1)] if sizes else 0


def measure(sources: Mapping[str, str], package: str) -> Measured:
    """`sources` by path from the root of the tree."""
    measured = Measured(top_level=sum(path.count("/") == 1 for path in sources))
    trees = {path: ast.parse(source, path) for path, source in sources.items()}
    for path, tree in trees.items():
        short = path.removeprefix(f"{package}/")
        measured.files[short] = len(sources[path].splitlines())
        for name, node in definitions(tree):
            sizes = measured.classes if isinstance(node, ast.ClassDef) else measured.functions
            key = f"{short}:{name}"
            sizes[key if key not in sizes else f"{key}@{node.lineno}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    measured.circles = circles(import_graph(trees))
    return measured


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(node: ast.AST, within: str = "") -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{within}.{child.name}" if within else child.name
            yield name, child
            yield from definitions(child, name)
        else:
            yield from definitions(child, within)


def import_graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> the modules of the same package it imports. A package that only encloses another module is not counted."""
    modules = {module_name(path): path for path in trees}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = {
            name for node in ast.walk(trees[path]) for name in imported(node, module, path.endswith("__init__.py"), modules)
        }
        graph[module] = found - {module}
    return graph


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(node: ast.AST, module: str, is_package: bool, modules: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            anchor = parts[: len(parts) - node.level + is_package]
            base = ".".join([*anchor, base] if base else anchor)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            if full in modules or base in modules:
                yield full if full in modules else base


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan), largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            place = stack.index(module)
            component = sorted(stack[place:])
            del stack[place:]
            if len(component) > 1:
                found.append(component)

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10 * len(graph) + 1000))
    for module in sorted(graph):
        if module not in index:
            visit(module)
    return sorted(found, key=lambda circle: (-len(circle), circle))


def sources_here(package: str) -> dict[str, str]:
    files = sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def sources_at(revision: str, package: str) -> dict[str, str]:
    """Raises SystemExit with git's own words."""
    done = subprocess.run(["git", "archive", "--format=tar", revision, package], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"--compare {revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        files = [member for member in archive if member.isfile() and member.name.endswith(".py")]
        return {member.name: archive.extractfile(member).read().decode() for member in files}  # type: ignore[union-attr]


def print_table(columns: Mapping[str, Mapping[str, int | str]]) -> None:
    names = list(next(iter(columns.values())))
    table = [["", *columns], *([name, *(str(column[name]) for column in columns.values())] for name in names)]
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", default="", metavar="REV", help="a commit, branch or tag of this repository")
    parser.add_argument("--package", default="kvrelay", metavar="FOLDER", help="what is measured (default kvrelay)")
    parser.add_argument("--names", action="store_true", help="also list what is over a limit, and the circles")
    arguments = parser.parse_args()
    now = measure(sources_here(arguments.package), arguments.package)
    columns = {"now": now.rows()}
    if arguments.compare:
        before = measure(sources_at(arguments.compare, arguments.package), arguments.package)
        columns = {arguments.compare: before.rows(), **columns}
    print_table(columns)
    if arguments.names:
        print("\n".join(["", *now.names()]))


if __name__ == "__main__":
    main()
