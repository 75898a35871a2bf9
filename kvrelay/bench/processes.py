"""The child processes of a benchmark: each on a core of its own choosing, told what to do by lines of JSON.

parent                                    child (python -m kvrelay.bench.NAME)
  Child(module, core=1)                     sets its affinity before it imports anything heavy
  send(message)  -- one line on stdin -->   for line in sys.stdin, or LineReader beside other sockets
  receive(kind)  <-- one line on stdout --  say(message)
  close()        -- end of file --------->  ends
"""

from __future__ import annotations

import os
import pathlib
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

import msgspec

from kvrelay.errors import BenchError

M = TypeVar("M")


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
        """Processor time it has used, which a busy neighbour does not change."""
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
        """Ends the process, kindly first."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for signal_it, patience_s in ((self._process.poll, 2.0), (self._process.terminate, 5.0), (self._process.kill, 5.0)):
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


def say(message: msgspec.Struct) -> None:
    """A child's line to its parent. Unbuffered streams (PYTHONUNBUFFERED) may take a part only: what is left is written on."""
    left = memoryview(msgspec.json.encode(message) + b"\n")
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]
