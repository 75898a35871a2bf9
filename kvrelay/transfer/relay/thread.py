"""The transfer thread: what it waits for, how others wake it, and what becomes of its work when it fails.

It sleeps in a ZMQ poll and is woken by messages, by commands of the engine's thread, and by the clock. Transfer engines and
fences have no way to wake a thread, so while moves are under way, or a fence has not passed, it looks at them every fraction of
a millisecond, less often the longer nothing happens. An exception ends the thread: `ended` then says why, its owner fails what
is open, and then itself: a worker that cannot hand over any more had better be replaced.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from kvrelay.log import Log

log = Log("transfer")

_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.0002
_SHORTEST_POLL_S = 0.001  # ZMQ counts in milliseconds
_SELECTABLE = 1024  # descriptors below
_PR_SET_TIMERSLACK = 29


def clock() -> float:
    """Seconds that also pass while the machine is suspended: a lease must not outlive a nap."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def sleep_exactly() -> None:
    """In this thread from now on: Linux ends a sleep up to 50 us late, to save power, unless it is told otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))


class ThreadFailedError(Exception):
    """The transfer thread ended, though it was not closed."""


class TransferThread(abc.ABC):
    """Owned by the engine's thread, which makes every call but those of the abstract methods."""

    def __init__(self, name: str, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._commands: deque[Callable[[], object]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False
        self._stopping = False
        self._closed = False
        self._begun = threading.Event()
        self._failure: Exception | None = None
        self.num_turns = 0
        self.ended = ""  # why, once nothing moves any more
        self.failed = False  # whether that was an exception's doing
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    # What runs in the thread (`turns.py`)

    @abc.abstractmethod
    def begin(self, poller: zmq.Poller) -> None: ...

    @abc.abstractmethod
    def turn(self) -> float:
        """Does everything that is to be done now. Returns after how many seconds it must run again."""

    @property
    @abc.abstractmethod
    def moving(self) -> bool:
        """Whether moves are under way."""

    @abc.abstractmethod
    def finish(self, reason: str) -> None:
        """Ends everything and closes what `begin` opened."""

    # What the owner calls

    def start(self) -> None:
        """Raises what `begin` raised."""
        self._thread.start()
        self._begun.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def call(self, command: Callable[[], object]) -> None:
        """Soon, in the thread, in order. Forgotten once it has ended."""
        if not self.ended:
            self._commands.append(command)
            self.wake()

    def note(self, command: Callable[[], object]) -> None:
        """As `call`, with the thread's next turn: does not wake it."""
        if not self.ended:
            self._commands.append(command)

    def wake(self) -> None:
        if self._asleep and not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    @property
    def has_ended(self) -> bool:
        """Whether `raise_failure` would."""
        return self.failed and bool(self.ended)

    def raise_failure(self) -> None:
        """Harmless while the thread runs, and where it was closed."""
        if self.has_ended:
            raise ThreadFailedError(self.ended)

    def run_commands(self) -> None:
        """Called by the thread."""
        while self._commands:
            self._commands.popleft()()

    def close(self, timeout_s: float = 10.0) -> None:
        """Harmless if closed."""
        if self._closed:
            return
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s)
        self._closed = True
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    # In the thread

    def _main(self) -> None:
        sleep_exactly()
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        reason = "the worker closes"
        try:
            self.begin(poller)
        except Exception as error:  # noqa: BLE001  the constructor raises it
            self._failure = error
            self.ended = str(error)
            return
        finally:
            self._begun.set()
        try:
            self._run(poller)
        except Exception as error:  # no request may wait for ever because of a fault here
            reason = f"the transfer thread failed: {type(error).__name__}: {error}"
            log.exception("transfer thread failed")
            self.failed = True
        self._finish(reason)

    def _run(self, poller: zmq.Poller) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            within_s = self.turn()
            self.num_turns += 1
            if not self.moving and within_s >= _SHORTEST_POLL_S:
                self._sleep(functools.partial(poller.poll, int(within_s * 1000)))
            elif not poller.poll(0) and not self._sleep(functools.partial(self._nap, pause_s if self.moving else within_s)):
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            self._forget_wakes()

    def _sleep(self, wait: Callable[[], object]) -> bool:
        """Whether something came: a command, or what else `wait` waits for."""
        self._asleep = True
        try:
            # What came before `_asleep` was set did not wake us, so look once more.
            return bool(self._commands or self._stopping or wait())
        finally:
            self._asleep = False

    def _nap(self, seconds: float) -> bool:
        """Counted in microseconds; messages do not end it, and commands only where the descriptor is one that select takes."""
        if self._wake_fd < _SELECTABLE:
            return bool(select.select([self._wake_fd], (), (), seconds)[0])
        time.sleep(seconds)
        return False

    def _forget_wakes(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _finish(self, reason: str) -> None:
        try:
            self.finish(reason)
        except Exception:  # the owner must learn that it is over, however it went
            log.exception("transfer thread did not end cleanly")
        self.ended = reason
        self._commands.clear()
        self._on_end()
