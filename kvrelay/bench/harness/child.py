"""A child process of a benchmark, on a core of its own or on any, and how the two talk: lines of JSON.

parent                                        child (python -m kvrelay.bench.NAME)
  Child([module], core=1)                       is on its core before it imports anything
  ask(message, kind) -- a line on stdin ---->   for message in commands(kind), or a LineReader polled beside sockets
                     <-- a line on stdout ---   say(answer)
  close()            -- end of file -------->   ends
"""

from __future__ import annotations

import os
import pathlib
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import BenchError

M = TypeVar("M")


def two_cores() -> tuple[int, int]:
    """Raises BenchError where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("this benchmark needs two cores, for processes that must not share one")
    return cores[0], cores[1]


class Child:
    """A process pinned to one core, or to none."""

    def __init__(self, arguments: list[str], core: int | None, environment: Mapping[str, str] | None = None) -> None:
        """`environment` has what the child's differs in from ours."""
        self.name = arguments[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environment is None else {**os.environ, **environment},
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
        assert self._process.stdout is not None
        self._lines = LineReader(self._process.stdout.fileno())

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

    def send(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise BenchError(f"{self.name} ended early; its messages are above") from error

    def receive(self, kind: type[M], timeout_s: float) -> M:
        return msgspec.json.decode(self._line(timeout_s), type=kind)

    def ask(self, message: msgspec.Struct, kind: type[M], timeout_s: float) -> M:
        self.send(message)
        return self.receive(kind, timeout_s)

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while (line := self._lines.next_line()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise BenchError(f"{self.name} did not answer within {timeout_s:g} s")
            if select.select([self._lines.fd], [], [], left)[0] and not self._lines.fill():
                raise BenchError(f"{self.name} ended early; its messages are above")
        return line

    def close(self) -> None:
        """Ends the process, kindly first. Commands of kvrelay read no input, so its end does not end them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        patience_of_end_s = 0.0 if self.name == "kvrelay" else 2.0
        ways = ((self._process.poll, patience_of_end_s), (self._process.terminate, 5.0), (self._process.kill, 5.0))
        for signal_it, patience_s in ways:
            signal_it()
            try:
                self._process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                continue
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class LineReader:
    """Whole lines from a file descriptor that is polled together with sockets."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lines: deque[bytes] = deque()
        self._rest = b""

    def fill(self) -> bool:
        """Reads once what is there. False at the end of the file."""
        data = os.read(self.fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(lines)
        return bool(data)

    def next_line(self) -> bytes | None:
        """If a whole one is there."""
        return self._lines.popleft() if self._lines else None


def commands(kind: Any) -> Iterator[Any]:
    """What the parent says, one message after the other, until it closes the pipe. `kind` may be a union."""
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line, type=kind)


def say(message: msgspec.Struct) -> None:
    """A child's line to its parent. Unbuffered streams (PYTHONUNBUFFERED) may take a part only: what is left is written on."""
    left = memoryview(msgspec.json.encode(message) + b"\n")
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]
