"""Processes that start from one prepared interpreter, the nursery: what they all import, it has imported once (`nursery.py`).

    process = prepared.popen([sys.executable, "-m", "kvrelay", "worker", ...])

Such a process behaves as one of `subprocess.Popen` does, with an environment, a group, descriptors and an exit status of its
own, but its parent is the nursery. Tests about a fresh interpreter, or about parents and children, use `subprocess` itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

ADDRESS = "KVRELAY_TESTS_NURSERY"  # in the environment: where it listens
_MAX_REPLY_BYTES = 256
_LOOK_AGAIN_S = 1.0
_CARD = pathlib.Path("/dev/nvidiactl")
_Descriptor = int | IO[Any] | None


class Process:
    """As much of `subprocess.Popen` as tests and the supervisor use."""

    def __init__(self, command: Sequence[str], nursery: socket.socket, stdin: IO[Any] | None, stdout: IO[Any] | None) -> None:
        self.args = list(command)
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._nursery = nursery
        self._lock = threading.Lock()
        self.pid = int(nursery.recv(_MAX_REPLY_BYTES))

    def poll(self) -> int | None:
        """The nursery keeps the zombie until its status was read here, so that no signal reaches another process."""
        with self._lock:
            if self.returncode is None:
                try:
                    status = self._nursery.recv(_MAX_REPLY_BYTES, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                self.returncode = int(status) if status else -signal.SIGKILL  # it ends with its nursery
                self._nursery.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 and timeout is not None:
                raise subprocess.TimeoutExpired(self.args, timeout)
            with contextlib.suppress(ValueError, OSError):  # another thread has read the status meanwhile
                select.select([self._nursery], [], [], min(left_s, _LOOK_AGAIN_S))
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def popen(
    command: Sequence[str],
    *,
    stdin: _Descriptor = None,
    stdout: _Descriptor = None,
    stderr: _Descriptor = None,
    text: bool = False,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    process_group: int | None = None,
    folder: pathlib.Path | None = None,
) -> Any:
    """What `subprocess.Popen` would give. A command that is no module or file of this Python is left to it, and so is every
    one where there is an NVIDIA card: its driver does not outlive a fork."""
    is_python = command[0] == sys.executable and (command[1] == "-m" or command[1].endswith(".py"))
    if not is_python or sys.platform != "linux" or _CARD.exists():
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, text=text, env=env, pass_fds=pass_fds,
            process_group=process_group, cwd=folder,
        )  # fmt: skip
    address = nursery()
    with contextlib.ExitStack() as theirs:

        def lend(asked: _Descriptor, inherited: int) -> int:
            if asked == subprocess.DEVNULL:
                return theirs.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
            if asked is None:
                return inherited
            return asked if isinstance(asked, int) else asked.fileno()

        ours_in = ours_out = None
        if stdin == subprocess.PIPE:
            read, write = os.pipe()
            ours_in, stdin = os.fdopen(write, "w" if text else "wb"), theirs.enter_context(os.fdopen(read, "rb", buffering=0))
        if stdout == subprocess.PIPE:
            read, write = os.pipe()
            ours_out, stdout = os.fdopen(read, "r" if text else "rb"), theirs.enter_context(os.fdopen(write, "wb", buffering=0))
        given = [lend(stdin, 0), lend(stdout, 1)]
        given.append(given[1] if stderr == subprocess.STDOUT else lend(stderr, 2))
        request = {
            "command": list(command),
            "environment": {**(os.environ if env is None else env), ADDRESS: address},
            "folder": str(folder or pathlib.Path.cwd()),
            "own_group": process_group is not None,
            "descriptors": [0, 1, 2, *pass_fds],
        }
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(request).encode()], [*given, *pass_fds])
    return Process(command, connection, ours_in, ours_out)


def nursery() -> str:
    """Where it listens: the one this process came from or has started, or one that is started now and ends with it."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvrelay-nursery-"))
    path = pathlib.Path(__file__).with_name("nursery.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(path.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OPENBLAS_NUM_THREADS": "1",  # a thread that exists before a fork is lost by it
    }
    command = [sys.executable, str(path), str(folder / "socket")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    assert process.stdin is not None
    assert process.stdout is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    assert process.stdout.readline(), "the nursery did not come up"
    process.stdout.close()
    os.environ[ADDRESS] = str(folder / "socket")
    return os.environ[ADDRESS]


def launch_by_it(*modules: str) -> None:
    """Processes that these modules start, where they are imported, come from the nursery from now on."""
    stand_in = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    for name in modules:
        if name in sys.modules:
            vars(sys.modules[name])["subprocess"] = stand_in
