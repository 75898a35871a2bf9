"""`python nursery.py SOCKET`: imports what processes of kvrelay need, then forks one whenever it is asked to (`prepared.py`).

    connect -> a request with the descriptors of the new process -> its id -> when it has ended its status -> close

It has one thread and computes nothing, so that nothing is lost by a fork. It ends when its standard input does, and what it
has started ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import prepared

IMPORTED = (
    "pytest",
    "kvrelay.cli.router",
    "kvrelay.cli.serve",
    "kvrelay.cli.worker",
    "kvrelay.launch.console",
    "kvrelay.launch.serve",
    "kvrelay.worker.encode_stage",
    "kvrelay.worker.relay",
    "kvrelay.worker.whole",
    "kvrelay.worker.worker",
)
_MAX_REQUEST_BYTES = 1 << 20
_MAX_DESCRIPTORS = 16
_OUT_OF_THE_WAY = 512  # descriptors that a process will have are below
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass
class Child:
    pid: int
    descriptor: int  # of the process: readable when it has ended
    asker: socket.socket | None  # None: it has left


class Nursery:
    """Forks, and tells who asked how each process ended. A process stays a zombie until its asker knows or is gone."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._end)
        self._children: dict[int, Child] = {}

    def run(self) -> dict[str, Any]:
        """Returns in each new process, with what it is to be."""
        while True:
            for key, _ in self._selector.select():
                request: dict[str, Any] | None = key.data(key.fileobj)
                if request is not None:
                    return request

    def _accept(self, _: object) -> None:
        asker, _address = self._listener.accept()
        self._selector.register(asker, selectors.EVENT_READ, self._fork)

    def _fork(self, asker: socket.socket) -> dict[str, Any] | None:
        said, given, _, _ = socket.recv_fds(asker, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
        self._selector.unregister(asker)
        if not said:
            asker.close()
            return None
        request: dict[str, Any] = json.loads(said)
        pid = os.fork()
        if pid == 0:
            self._become(asker, request, given)
            return request
        for descriptor in given:
            os.close(descriptor)
        if request["own_group"]:
            _set_group(pid)
        child = Child(pid, os.pidfd_open(pid), asker)
        self._children[pid] = child
        self._selector.register(child.descriptor, selectors.EVENT_READ, lambda _: self._ended(child))
        self._selector.register(asker, selectors.EVENT_READ, lambda _: self._left(child))
        _say(asker, pid)
        return None

    def _become(self, asker: socket.socket, request: dict[str, Any], given: list[int]) -> None:
        """In the new process: lets go of all that is the nursery's, and takes what it was given."""
        asker.close()
        self._listener.close()
        self._selector.close()
        for child in self._children.values():
            os.close(child.descriptor)
            if child.asker is not None:
                child.asker.close()
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for descriptor in given]
        for descriptor in given:
            os.close(descriptor)
        for descriptor, wanted in zip(moved, request["descriptors"], strict=True):
            os.dup2(descriptor, wanted)
            os.close(descriptor)
        if request["own_group"]:
            _set_group(0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"kvrelay")
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])

    def _ended(self, child: Child) -> None:
        self._selector.unregister(child.descriptor)
        if child.asker is None:
            self._forget(child)
            return
        result = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        _say(child.asker, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    def _left(self, child: Child) -> None:
        """It knows the status, or has ended itself."""
        assert child.asker is not None
        self._selector.unregister(child.asker)
        child.asker.close()
        child.asker = None
        if child.descriptor not in self._selector.get_map():
            self._forget(child)

    def _forget(self, child: Child) -> None:
        os.waitpid(child.pid, 0)
        os.close(child.descriptor)
        del self._children[child.pid]

    def _end(self, _: object) -> None:
        path = pathlib.Path(self._path)
        path.unlink()
        path.parent.rmdir()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)
        sys.exit(0)


def _set_group(pid: int) -> None:
    """Both sides do it, as neither knows which of them is first."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it has become another program, or has ended
        os.setpgid(pid, pid)


def _say(asker: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it has left, which the selector tells
        asker.send(str(number).encode())


def run(command: list[str]) -> None:
    """As the interpreter would from its command line. What this process launches comes from the nursery, too."""
    prepared.launch_by_it("kvrelay.launch.supervise")
    sys.orig_argv = command  # a worker that begins anew executes it
    if command[1] == "-m":
        sys.argv = command[2:]
        sys.path[0] = str(pathlib.Path.cwd())
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command[1:]
        sys.path[0] = str(pathlib.Path(command[1]).parent)
        sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        runpy.run_path(command[1], run_name="__main__")


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost by a fork"
    nursery = Nursery(sys.argv[1])
    gc.freeze()
    print("ready", flush=True)
    run(nursery.run()["command"])


if __name__ == "__main__":
    main()
