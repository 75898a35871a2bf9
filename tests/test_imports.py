"""Who may import whom. The picture that this file enforces:

    vocabulary <- wire <- engine | native <- kernels <- models <- runner | checkpoint, text, media
               | planes <- discovery, events, transfer <- router, worker <- frontend, simulate <- launch <- offline
               <- cli, bench

The sources are parsed, not imported, so an import inside a function counts as much as one at the top of a file.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvrelay"

VOCABULARY = frozenset({"config", "errors", "ids", "log", "metrics", "options", "progress", "sampling", "states", "version"})

# Part -> the parts it may import besides the vocabulary and itself. A part is a folder or file right under kvrelay/.
ALLOWED: dict[str, frozenset[str]] = {
    "wire": frozenset(),
    "media": frozenset(),
    "native": frozenset(),
    "planes": frozenset(),
    "checkpoint": frozenset(),
    "text": frozenset(),
    "engine": frozenset({"wire", "native", "media"}),
    "kernels": frozenset({"native"}),
    "models": frozenset({"checkpoint", "kernels"}),
    "runner": frozenset({"wire", "engine", "kernels", "models", "checkpoint", "text", "media", "native"}),
    "discovery": frozenset({"wire", "planes"}),
    "events": frozenset({"wire", "planes", "discovery", "native"}),
    "transfer": frozenset({"wire", "engine", "native", "planes"}),
    "router": frozenset({"wire", "discovery", "events", "native", "planes"}),
    "worker": frozenset(
        {
            "wire",
            "media",
            "engine",
            "runner",
            "checkpoint",
            "text",
            "discovery",
            "transfer",
            "events",
            "planes",
            "native",
        }
    ),
    "frontend": frozenset({"wire", "media", "text", "planes", "router"}),
    "launch": frozenset({"wire", "planes", "checkpoint", "text", "discovery", "events", "media", "router", "frontend"}),
    "simulate": frozenset({"wire", "engine", "discovery", "events", "router", "worker", "media"}),
    "offline": frozenset({"wire", "engine", "checkpoint", "text", "worker", "router", "launch"}),
}
# May import everything.
TOP = frozenset({"__init__", "__main__", "cli", "bench"})

# Folder of runner/ or engine/ that outsiders may use where only a narrow door is open: (importer, part) -> module prefixes.
DOORS: dict[tuple[str, str], tuple[str, ...]] = {
    ("engine", "media"): ("kvrelay.media.placeholders",),
    ("simulate", "media"): ("kvrelay.media.placeholders",),
    ("simulate", "worker"): ("kvrelay.worker.callers",),
    ("runner", "engine"): ("kvrelay.engine.interfaces", "kvrelay.engine.fence"),
    ("transfer", "engine"): ("kvrelay.engine.movers", "kvrelay.engine.fence"),
}

FORBIDDEN_LIBRARIES: dict[str, frozenset[str]] = {
    "engine": frozenset({"torch", "zmq", "asyncio", "socket", "uvloop", "transformers", "starlette"}),
    "wire": frozenset({"torch", "zmq", "asyncio", "socket"}),
    "media": frozenset({"torch", "transformers", "zmq"}),
    "launch": frozenset({"torch", "transformers"}),
    "checkpoint": frozenset({"torch", "transformers", "zmq"}),
    "text": frozenset({"torch", "transformers", "zmq"}),
    "discovery": frozenset({"torch", "transformers"}),
    "router": frozenset({"torch", "transformers", "starlette", "uvicorn"}),
    "frontend": frozenset({"torch", "transformers", "zmq"}),
    "runner": frozenset({"zmq", "starlette", "uvicorn"}),
    "models": frozenset({"zmq", "transformers"}),
}
FORBIDDEN_EVERYWHERE = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve"})
ONLY_IN_BENCH = frozenset({"transformers"})


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imports_of(path: Path, source: str | None = None) -> Iterator[tuple[int, str]]:
    """Line and absolute module of every import statement, wherever it stands.

    `from package import name` means the module `package.name` where there is one, else `package` itself.
    """
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(source if source is not None else path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield node.lineno, submodule if is_module(submodule) else base


def is_module(name: str) -> bool:
    target = ROOT.joinpath(*name.split("."))
    return target.with_suffix(".py").is_file() or (target / "__init__.py").is_file()


def broken_direction(importer: str, imported: str) -> str | None:
    """Why this import of one of our modules is wrong, or None."""
    part, wanted = part_of(importer), part_of(imported)
    if part in TOP or wanted == part:
        return None
    if part in VOCABULARY:
        return None if wanted in VOCABULARY else f"vocabulary imports {wanted}/"
    if wanted in VOCABULARY:
        return None
    if part not in ALLOWED:
        return f"{part} has no place in the picture yet: add it to ALLOWED"
    if wanted == "__init__":
        return "imports the package's front door; import the module that defines the name"
    if wanted not in ALLOWED[part]:
        return f"{part} may not import {wanted}"
    door = DOORS.get((part, wanted))
    if door is not None and not any(imported == name or imported.startswith(f"{name}.") for name in door):
        return f"{part} may import only {', '.join(door)} of {wanted}"
    return None


def broken_library(importer: str, library: str) -> str | None:
    part = part_of(importer)
    if library in FORBIDDEN_LIBRARIES.get(part, frozenset()) | FORBIDDEN_EVERYWHERE:
        return f"{part} may not import {library}"
    if library in ONLY_IN_BENCH and part != "bench":
        return f"only bench/ may import {library}"
    return None


def problems_of(path: Path, source: str | None = None) -> list[str]:
    importer = module_of(path)
    found: dict[str, None] = {}
    for line, imported in imports_of(path, source):
        if imported.split(".")[0] == "kvrelay":
            reason = broken_direction(importer, imported)
        else:
            reason = broken_library(importer, imported.split(".")[0])
        if reason:
            found[f"{path.relative_to(ROOT)}:{line}: {imported}: {reason}"] = None
    return list(found)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_picture(path: Path) -> None:
    assert problems_of(path) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("engine/scheduler.py", "import torch", "engine may not import torch"),
        ("engine/scheduler.py", "def f():\n    import zmq.asyncio", "engine may not import zmq"),
        ("engine/scheduler.py", "from kvrelay.router import stream", "engine may not import router"),
        ("engine/scheduler.py", "from ..router.stream import RequestStream", "engine may not import router"),
        ("states.py", "import kvrelay.wire.codec", "vocabulary imports wire/"),
        ("router/stream.py", "from kvrelay.frontend import __name__", "router may not import frontend"),
        ("frontend/app.py", "from torch import nn", "frontend may not import torch"),
        ("models/llama.py", "import kvrelay.runner.batch", "models may not import runner"),
        ("worker/loop.py", "from kvrelay import LLM", "imports the package's front door"),
        ("worker/loop.py", "import pickle", "worker may not import pickle"),
        ("text/tokenizer.py", "import transformers", "text may not import transformers"),
        ("gadget.py", "import kvrelay.wire", "gadget has no place in the picture yet"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, complaint: str) -> None:
    assert any(complaint in problem for problem in problems_of(PACKAGE / file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/scheduler.py", "from kvrelay.wire.serving import Submit\nfrom kvrelay import states"),
        ("runner/batch.py", "from kvrelay.engine.interfaces import StepPlan\nimport torch"),
        ("models/llama.py", "from kvrelay.kernels.base import Kernels"),
        ("cli/main.py", "from kvrelay.worker import __name__\nfrom kvrelay import bench"),
    ],
)
def test_a_right_import_passes(file: str, source: str) -> None:
    assert problems_of(PACKAGE / file, source) == []


def test_parts_without_torch_do_not_load_it() -> None:
    """Also not through a third party: the router process must stay small and start fast."""
    parts = ("checkpoint", "text", "discovery", "router", "frontend", "engine")
    modules = [module_of(path) for path in sources() if part_of(module_of(path)) in parts]
    script = f"import sys\nfor name in {modules!r}:\n    __import__(name)\n    assert 'torch' not in sys.modules, name"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


# The shape of the house


def imports_between_modules() -> dict[str, set[str]]:
    """Module -> our modules that it imports, wherever the statement stands: one inside a function hides a circle, no more."""
    graph: dict[str, set[str]] = {}
    for path in sources():
        importer = module_of(path)
        ours = {name for _, name in imports_of(path) if name.split(".")[0] == "kvrelay"}
        graph[importer] = ours - {importer, "kvrelay"}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, or none."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        if module in done:
            return []
        for imported in sorted(graph.get(module, ())):
            if ring := visit(imported, [*way, module]):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(graph) if (ring := visit(module, []))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_in(imports_between_modules()) == []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_the_top_level_has_at_most_twelve_files() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_classes_stay_readable(path: Path) -> None:
    """A file of at most 400 lines, a class of at most 300."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes if (node.end_lineno or 0) - node.lineno + 1 > 300] == []
