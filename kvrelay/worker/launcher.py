"""The tie of a worker or router to the process that launched it: a socket pair, inherited (messages: wire/launcher.py).

It tells the launcher why the process could not start, and its end of file tells the process that the launcher is gone: then
it ends at once, so that nothing is left behind even by a kill -9. On Linux the kernel is asked for the same
(PR_SET_PDEATHSIG), for the time in which this process is too busy loading to run a thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from kvrelay.states import Role
from kvrelay.wire.launcher import Becomes, Ends, Ready, ToLauncher, ToRouter, decode_told, encode_line

_PR_SET_PDEATHSIG = 1
_MAX_REASON_CHARACTERS = 2000


class LauncherTie:
    """The end of the process that was launched."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.on_told: Callable[[ToRouter], None] = lambda _: None  # on a thread of its own
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
        threading.Thread(target=self._watch, name="launcher-watch", daemon=True).start()

    def report(self, reason: str) -> None:
        """Why this process ends. The launcher shows it."""
        if not self._send(Ends(reason=reason[:_MAX_REASON_CHARACTERS])):
            print(f"error: {reason}", file=sys.stderr)

    def ready(self) -> None:
        """It serves."""
        self._send(Ready())

    def becomes(self, role: Role) -> None:
        """This process starts again in another role. A launcher that is gone need not know."""
        self._send(Becomes(role=role))

    def _send(self, message: ToLauncher) -> bool:
        try:
            self._socket.sendall(encode_line(message))
        except OSError:
            return False
        return True

    def _watch(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self.on_told(decode_told(line))
        finally:  # a broken tie is a cut tie
            os._exit(1)
