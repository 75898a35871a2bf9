"""The peers of `bench engine --peer`: those that are installed run the same work; of the others it is said how to get them.

transformers   the converted checkpoint in float32, beside ours in float32, in this process
vllm           the same, in a process of `--peer-python`
llama.cpp      the GGUF file itself, beside ours with its blocks (`--weights auto`), in a process of `--peer-python`
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from typing import Protocol

from kvrelay.bench.engine.peer import TransformersSubject
from kvrelay.bench.engine.work import WARM_STEPS
from kvrelay.bench.harness.child import VLLM_PYTHON
from kvrelay.errors import BenchError

NAMES = ("transformers", "vllm", "llama.cpp")
_MODULES = {"transformers": "transformers", "vllm": "vllm", "llama.cpp": "llama_cpp"}
HOW = {
    "transformers": "make install, or pip install 'kvrelay[dev]'",
    "vllm": "make .venv-vllm/.installed, or name another Python that has it: --peer-python PATH",
    "llama.cpp": "make .venv-vllm/.installed-llama-cpp (ten minutes), or name another Python that has it: --peer-python PATH",
}
_LOAD_S = 1200.0  # vLLM compiles
_ANSWER_S = 600.0
_SCRIPT = pathlib.Path(__file__).with_name("peer_process.py")


class PeerMissing(BenchError):
    """Not installed, or the model has no file for it."""


class Subject(Protocol):
    """What is measured: our engine, or a peer."""

    def decode(self, batch: int, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps of `batch` sequences of CONTEXT tokens each."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt that no cache has seen to its first output token."""

    def close(self) -> None: ...


def slug(name: str) -> str:
    """As figures are called."""
    return name.replace(".", "_")


def open_peer(
    name: str, folder: str, gguf: pathlib.Path | None, prompts: list[list[int]], threads: int, python: str
) -> Subject:
    """Raises PeerMissing."""
    if name == "llama.cpp" and gguf is None:
        raise PeerMissing("the model is no GGUF file")
    if name == "transformers":
        if not _has(sys.executable, name):
            raise PeerMissing(f"not installed: {HOW[name]}")
        return TransformersSubject(folder, prompts[:4], threads)
    found = next((one for one in _pythons(python) if _has(one, name)), None)
    if found is None:
        raise PeerMissing(f"not installed: {HOW[name]}")
    return PeerProcess([found, str(_SCRIPT), name, str(gguf) if name == "llama.cpp" else folder, str(threads)], prompts)


def _pythons(named: str) -> list[str]:
    if named:
        return [named]
    return [sys.executable, *([str(VLLM_PYTHON.absolute())] if VLLM_PYTHON.exists() else [])]


def _has(python: str, name: str) -> bool:
    """Whether that interpreter would find the peer; it is not imported."""
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({_MODULES[name]!r}) is None)"
    try:
        return subprocess.run([python, "-c", program], capture_output=True, timeout=120, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"--peer-python: {python} does not run: {error}") from error


class PeerProcess:
    """Implements `Subject` by `peer_process.py`."""

    def __init__(self, command: list[str], prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True)
        try:
            self._read(_LOAD_S)
        except BenchError:
            self.close()
            raise

    def decode(self, batch: int, steps: int) -> list[float]:
        return self._order({"decode": self._prompts[:batch], "warm": WARM_STEPS, "steps": steps})

    def prefill(self, prompt: list[int]) -> float:
        return self._order({"prefill": prompt})[0]

    def close(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)  # the end of its input is its end
        self._process.kill()
        self._process.wait()
        self._said.close()

    def _order(self, order: dict[str, object]) -> list[float]:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which reading tells
            print(json.dumps(order), file=self._process.stdin, flush=True)
        seconds: list[float] = json.loads(self._read(_ANSWER_S))
        return seconds

    def _read(self, patience_s: float) -> str:
        """A line. Raises BenchError with the last of what the peer has printed."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + patience_s
        while not wait([self._process.stdout.fileno()], 1.0):
            if time.monotonic() > deadline:
                self._process.kill()
                raise BenchError(f"the peer did not answer within {patience_s:g} s: {self._last_words()}")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the peer ended: {self._last_words()}")
        return line

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "it printed nothing"
