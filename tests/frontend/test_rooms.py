"""The rooms of the front end: who may import whom inside of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvrelay.frontend

ROOT = Path(kvrelay.frontend.__file__).parent
PREFIX = "kvrelay.frontend."

# Room or file -> what it may import of the front end besides itself.
ALLOWED = {
    "http": {"http"},
    "prompt": {"http", "prompt", "service"},
    "answer": {"http", "prompt", "service", "answer"},
    "pages": {"feed", "http", "prompt", "service", "answer", "pages"},
    "feed": {"feed"},
    "service": {
        "feed",
        "http",
        "prompt.types",
        "prompt.responses_types",
        "prompt.messages_types",
        "prompt.call_formats",
        "prompt.images",
    },
    "app": {"feed", "http", "prompt", "service", "answer", "pages"},
    "fake_backend": set(),
}


def imports_of(path: Path) -> Iterator[str]:
    """Modules of the front end that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PREFIX):
            module = str(node.module).removeprefix(PREFIX)
            is_file = (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
            yield from [module] if is_file else [f"{module}.{alias.name}" for alias in node.names]


def files() -> dict[str, Path]:
    found = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.rglob("*.py")}
    return {module: path for module, path in found.items() if not module.endswith("__init__")}


@pytest.mark.parametrize("module", sorted(files()))
def test_imports_stay_inside_of_what_a_room_may_know(module: str) -> None:
    allowed = ALLOWED[module.split(".")[0]]
    assert [name for name in imports_of(files()[module]) if name not in allowed and name.split(".")[0] not in allowed] == []


def test_there_is_no_circle() -> None:
    waiting = {module: set(imports_of(path)) for module, path in files().items()}
    while free := [module for module, needs in waiting.items() if not needs & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert waiting == {}
