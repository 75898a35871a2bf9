"""The worker processes of `kvrelay serve`: started, watched, restarted, and stopped without leaving one behind.

    start -> each worker runs -> ends before `all_ready`  -> `failed` gets the reason, serve gives up
                              -> ends later               -> restarted after a pause that doubles (1 s to 30 s)
                              -> ends 5 times in a minute -> given up; when none is left, `failed` gets the reason

Each worker holds one end of a socket pair (worker/launcher.py): if this process dies in any way, the workers see its end.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.errors import WorkerDiedError
from kvrelay.log import Log

log = Log("serve")

STOP_PATIENCE_S = 8.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_HEALTHY_AFTER_S = 60.0  # a worker that ran so long begins with a clean record
_MAX_QUICK_DEATHS = 5
_MAX_REASON_BYTES = 4096


class Child:
    """One run of one worker process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._tie, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, f"--launcher-fd={theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in the terminal is for us; we tell the workers
            )
        self.pid = self._process.pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._wait, args=[asyncio.get_running_loop()], daemon=True).start()

    def signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def reason(self) -> str:
        """Why it ended, as it said itself or as its exit status tells. Only after it ended."""
        self._tie.setblocking(False)
        try:
            told = self._tie.recv(_MAX_REASON_BYTES).decode(errors="replace")
        except OSError:
            told = ""
        status = self._process.returncode
        return told or (f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}")

    def close(self) -> None:
        self._tie.close()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        try:
            loop.call_soon_threadsafe(self._ended, status)
        except RuntimeError:
            return  # the loop is closed: nobody asks any more

    def _ended(self, status: int) -> None:
        if not self.exited.done():
            self.exited.set_result(status)


@dataclass(slots=True)
class _Slot:
    """One worker, through all its restarts."""

    index: int
    child: Child | None = None
    quick_deaths: int = 0
    given_up: bool = False
    deaths: list[str] = field(default_factory=list)


class Supervisor:
    """Keeps one process per command running. Used on one event loop."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._slots = [_Slot(index) for index in range(len(commands))]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._all_ready = False
        self.failed: asyncio.Future[WorkerDiedError] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(slot)) for slot in self._slots]

    def all_ready(self) -> None:
        """From now on a worker that ends is restarted."""
        self._all_ready = True

    @property
    def pids(self) -> list[int]:
        return [slot.child.pid for slot in self._slots if slot.child is not None and not slot.child.exited.done()]

    async def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Asks kindly, waits, then kills. Nothing runs afterwards."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [slot.child for slot in self._slots if slot.child is not None]
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
            running = [child for child in children if not child.exited.done()]
            for child in running:
                child.signal(number)
            if running:
                await asyncio.wait([child.exited for child in running], timeout=wait_s)
        for child in children:
            child.close()

    async def _keep(self, slot: _Slot) -> None:
        while not slot.given_up:
            began_at = time.monotonic()
            slot.child = Child(self._commands[slot.index])
            await asyncio.shield(slot.child.exited)
            reason = slot.child.reason()
            slot.child.close()
            slot.child = None
            if not self._all_ready:
                self._fail(f"worker {slot.index} could not start: {reason}")
                return
            await self._pause(slot, reason, time.monotonic() - began_at)

    async def _pause(self, slot: _Slot, reason: str, ran_s: float) -> None:
        slot.quick_deaths = 1 if ran_s >= _HEALTHY_AFTER_S else slot.quick_deaths + 1
        if slot.quick_deaths >= _MAX_QUICK_DEATHS:
            slot.given_up = True
            log.error("a worker ended too often; giving it up", worker=slot.index, reason=reason)
            if all(other.given_up for other in self._slots):
                self._fail(f"every worker ended too often; the last one: {reason}")
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (slot.quick_deaths - 1))
        log.warning("a worker ended; starting another", worker=slot.index, reason=reason, pause_s=pause_s)
        await asyncio.sleep(pause_s)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(WorkerDiedError(reason))


def worker_command(flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "kvrelay", "worker", *flags]
