"""Processes beside a benchmark, each on a core of its own or on any.

with Child(core=1) as child:                     Python, on its core before it imports anything
    child.call(load.run, request)                runs a function there; what it returns or raises comes back
    child.keep(Peer, ...)                        makes an object that stays there,
    child.ask(Peer.move, ...)                    and calls a method of it
with Command(["serve", ...], core=1) as server:  a command of kvrelay

Only what can be pickled goes to a child and comes back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvrelay.errors import BenchError, KVRelayError

P = ParamSpec("P")
R = TypeVar("R")

VLLM_PYTHON = pathlib.Path(".venv-vllm/bin/python")
"""Where `make .venv-vllm/.installed` puts vLLM, which does not fit our own environment."""
CONTEXTPILOT_PYTHON = pathlib.Path(".venv-contextpilot/bin/python")
"""Where `make .venv-contextpilot/.installed` puts ContextPilot, which does not either."""

_SPAWN = multiprocessing.get_context("spawn")
_ANSWER_S = 120.0
_END_S = 2.0
_KILL_S = 5.0


def two_cores() -> tuple[int, int]:
    """Raises BenchError where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("this benchmark needs two cores, for processes that must not share one")
    return cores[0], cores[1]


class Child(contextlib.AbstractContextManager["Child"]):
    """A process that does what it is told, one thing after the other."""

    def __init__(self, core: int | None = None, answer_s: float = _ANSWER_S) -> None:
        """`answer_s` is how long one call may take."""
        self._answer_s = answer_s
        self._pipe, there = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_obey, args=(there,), daemon=True)
        with _on(core):
            self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Raises what the function raised of ours, and BenchError if the child ended or took too long."""
        try:
            self._pipe.send((function, arguments, named))
            if not self._pipe.poll(self._answer_s):
                raise BenchError(f"{function.__module__} did not answer within {self._answer_s:g} s")
            answer: R | KVRelayError = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise BenchError(f"{function.__module__} ended early; its messages are above") from error
        if isinstance(answer, KVRelayError):
            raise answer
        return answer

    def keep(self, make: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
        self.call(_keep, make, arguments, named)

    def ask(self, method: Callable[Concatenate[Any, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """`method` is of what the child keeps."""
        answer: R = self.call(_ask, method, arguments, named)
        return answer

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(_END_S)
        for end in (self._process.terminate, self._process.kill):
            if self._process.exitcode is None:
                end()
                self._process.join(_KILL_S)


def _obey(parent: Connection) -> None:
    """The child's main: ends with the parent's end of the pipe, or with an error that is not ours, which it shows."""
    with contextlib.suppress(EOFError):
        while True:
            function, arguments, named = parent.recv()
            try:
                answer = function(*arguments, **named)
            except KVRelayError as error:
                answer = error
            parent.send(answer)


_kept: list[Any] = []  # at most one, in a child


def _keep(make: Callable[..., object], arguments: Sequence[object], named: Mapping[str, object]) -> None:
    _kept[:] = [make(*arguments, **named)]


def _ask(method: Callable[..., Any], arguments: Sequence[object], named: Mapping[str, object]) -> Any:
    return method(_kept[0], *arguments, **named)


class Command(contextlib.AbstractContextManager["Command"]):
    """`kvrelay ARGUMENTS`, or another module. `environment` has what its environment differs in from ours."""

    def __init__(
        self,
        arguments: list[str],
        core: int | None = None,
        environment: Mapping[str, str] | None = None,
        module: str = "kvrelay",
    ) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._core = core
        self._environment = {**os.environ, **(environment or {})}
        self._started: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """An interrupt that comes meanwhile ends what was started."""
        nowhere = subprocess.DEVNULL
        try:
            with _uninterrupted(), _on(self._core):
                self._started = subprocess.Popen(self._command, stdin=nowhere, stdout=nowhere, env=self._environment)
        except KeyboardInterrupt:
            if self._started is not None:
                self.__exit__()
            raise
        return self

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._started is not None
        return self._started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Processor time it has used, which other processes do not change."""
        fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_KILL_S)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A signal that would interrupt is handled at the end. Only the main thread is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    with contextlib.ExitStack() as at_end:
        at_end.callback(_raise_signals, came)
        for number in (signal.SIGINT, signal.SIGTERM):
            usual = signal.getsignal(number)
            if usual is not signal.SIG_IGN:  # which a process that is started now would not inherit
                at_end.callback(signal.signal, number, usual)
                signal.signal(number, lambda number, _: came.append(number))
        yield


def _raise_signals(numbers: list[int]) -> None:
    for number in numbers:
        signal.raise_signal(number)


@contextlib.contextmanager
def _on(core: int | None) -> Iterator[None]:
    """A process that is started now inherits the core."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, usual if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)
