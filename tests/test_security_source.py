"""Nothing in the package turns bytes of a peer, or of a file, into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "kvrelay"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)

DANGEROUS_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "code"})
DANGEROUS_NAMES = frozenset({"eval", "exec", "compile", "__import__"})
DANGEROUS_CALLS = frozenset(
    {
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "jinja2.Environment",
        "jinja2.Template",
    }
)
PICKLE_METHODS = frozenset({"send_pyobj", "recv_pyobj"})  # of ZMQ sockets


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def keyword(call: ast.Call, name: str) -> object:
    """Its value if it is a constant; `...` if it is anything else."""
    values = [given.value for given in call.keywords if given.arg == name]
    if not values:
        return None
    return values[0].value if isinstance(values[0], ast.Constant) else ...


def imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return {name.split(".")[0] for name in names}


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from sorted(imported(node) & DANGEROUS_MODULES)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in DANGEROUS_NAMES | DANGEROUS_CALLS or name.rpartition(".")[2] in PICKLE_METHODS:
                yield name
            if name == "torch.load" and keyword(node, "weights_only") is not True:
                yield "torch.load without weights_only=True"
            if name in ("np.load", "numpy.load") and keyword(node, "allow_pickle") not in (None, False):
                yield f"{name} with allow_pickle"
            if keyword(node, "shell") not in (None, False):
                yield "shell=True"
            if keyword(node, "trust_remote_code") not in (None, False):
                yield "trust_remote_code"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_bytes_become_code(path: Path) -> None:
    assert list(dangers(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing, marshal as m",
        "eval(text)",
        "exec(text, {})",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=chosen)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=chosen)",
        "os.system(text)",
        "self.socket.recv_pyobj()",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "jinja2.Template(text)",
    ],
)
def test_a_danger_is_found(line: str) -> None:
    assert list(dangers(line))


@pytest.mark.parametrize(
    "line",
    [
        "yaml.safe_load(text)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "subprocess.run([program], shell=False)",
        "model.eval()",
        "re.compile(text)",
        "pattern.compile",
    ],
)
def test_what_is_harmless_passes(line: str) -> None:
    assert not list(dangers(line))
