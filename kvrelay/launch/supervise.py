"""Worker and router processes of this machine: started, watched, restarted, and stopped without leaving one behind.

    start -> each worker runs -> ends before `all_ready`  -> `failed` gets the reason, the start is given up
                              -> ends as it was told      -> not restarted: it was drained, here or by a SIGTERM from elsewhere
                              -> ends otherwise           -> restarted after a pause that doubles (1 s to 30 s)
                              -> 5 times within a minute  -> given up; when none is left, `failed` gets the reason

A router that ends as it was told is replaced at once: so an operator can have all of them started anew, one after the other.

A worker that starts again by itself, in another role or after it stood still, keeps its process: nothing is seen of it here,
except that its successor, should it ever need one, begins in its last role.

Each process holds one end of a socket pair (worker/launcher.py): if this process dies in any way, they see its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from kvrelay.errors import WorkerDiedError
from kvrelay.log import Log
from kvrelay.states import Role
from kvrelay.wire.launcher import Becomes, CrashOutcome, Ends, Ready, ToRouter, decode_lines, encode_line, with_role

log = Log("serve")

STOP_PATIENCE_S = 8.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_HEALTHY_AFTER_S = 60.0  # a worker that ran for this time begins with a clean record
_MAX_QUICK_DEATHS = 5
_MAX_WORDS_BYTES = 64 * 1024


class Child:
    def __init__(self, command: Sequence[str], on_ready: Callable[[], None] = lambda: None) -> None:
        self._tie, theirs = socket.socketpair()
        self._tie.setblocking(False)
        self._words = b""
        self._on_ready = on_ready
        self.is_ready = False  # as it said itself; workers do not
        with theirs:
            self._process = subprocess.Popen(
                [*command, f"--launcher-fd={theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in the terminal is for us; we tell the others
            )
        self.pid = self._process.pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._tie, self._listen)
        threading.Thread(target=self._wait, args=[asyncio.get_running_loop()], daemon=True).start()

    def tell(self, message: ToRouter) -> None:
        with contextlib.suppress(OSError):  # it ends, or does not listen
            self._tie.send(encode_line(message))

    def signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def last_words(self) -> tuple[str, Role | None]:
        """Why it ended, as it said itself or as its exit status tells; and the role it had taken. Only after it ended."""
        status = self._process.returncode
        reason = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        role: Role | None = None
        self._listen()
        for message in decode_lines(self._words):
            match message:
                case Ready():
                    pass
                case Becomes():
                    role = message.role
                case Ends():
                    reason = message.reason
                case _:
                    assert_never(message)
        return reason, role

    @property
    def ended_as_told(self) -> bool:
        """By a drain, or by a SIGTERM that came before it could drain. Only after it ended."""
        return self._process.returncode in (0, -signal.SIGTERM)

    def _listen(self) -> None:
        try:
            heard = self._tie.recv(_MAX_WORDS_BYTES)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            asyncio.get_running_loop().remove_reader(self._tie)
        self._words = (self._words + heard)[-_MAX_WORDS_BYTES:]
        if not self.is_ready and any(isinstance(message, Ready) for message in decode_lines(self._words)):
            self.is_ready = True
            self._on_ready()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._tie)
        self._tie.close()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        try:
            loop.call_soon_threadsafe(self._ended, status)
        except RuntimeError:
            return  # the loop is closed, and with it the supervisor

    def _ended(self, status: int) -> None:
        if not self.exited.done():
            self.exited.set_result(status)


@dataclass(slots=True)
class _Supervised:
    """One process, through all its restarts."""

    index: int
    command: Sequence[str]
    child: Child | None = None
    quick_deaths: int = 0
    given_up: bool = False
    left: bool = False  # as it was told


class Supervisor:
    """Keeps one process per command running. Used on one event loop."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        what: str = "worker",
        comes_back: bool = False,
        on_crash: Callable[[CrashOutcome], None] = lambda _: None,
    ) -> None:
        """`what` they are. `comes_back`: one that ends as it was told is replaced. `on_crash` hears what became of one."""
        self._on_crash = on_crash
        self._what, self._comes_back = what, comes_back
        self._ready_changed = asyncio.Event()
        self._workers = [_Supervised(index, command) for index, command in enumerate(commands)]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._all_ready = False
        self.failed: asyncio.Future[WorkerDiedError] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self._workers]

    def all_ready(self) -> None:
        """From now on a worker that ends is restarted."""
        self._all_ready = True

    async def until_ready(self) -> None:
        """Returns when each of them has said so itself."""
        while not all(worker.child is not None and worker.child.is_ready for worker in self._workers):
            self._ready_changed.clear()
            await self._ready_changed.wait()

    def signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.child is not None:
                worker.child.signal(number)

    def tell(self, message: ToRouter) -> None:
        for worker in self._workers:
            if worker.child is not None:
                worker.child.tell(message)

    @property
    def pids(self) -> list[int]:
        return [worker.child.pid for worker in self._workers if worker.child is not None and not worker.child.exited.done()]

    async def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Asks kindly, waits, then kills. Nothing runs afterwards."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [worker.child for worker in self._workers if worker.child is not None]
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
            running = [child for child in children if not child.exited.done()]
            for child in running:
                child.signal(number)
            if running:
                await asyncio.wait([child.exited for child in running], timeout=wait_s)
        for child in children:
            child.close()

    async def _keep(self, worker: _Supervised) -> None:
        while not worker.given_up:
            began_at = time.monotonic()
            worker.child = child = Child(worker.command, self._ready_changed.set)
            await asyncio.shield(child.exited)
            reason, role = child.last_words()
            child.close()
            worker.child = None
            if not self._all_ready:
                self._fail(f"{self._what} {worker.index} could not start: {reason}")
                return
            if child.ended_as_told and self._comes_back:
                log.info(f"a {self._what} ended as it was told; starting another", number=worker.index)
                continue
            if child.ended_as_told:
                worker.left = True
                log.info(f"a {self._what} left as it was told; no other takes its place", number=worker.index)
                return
            if role is not None:
                worker.command = with_role(worker.command, role)
            await self._pause(worker, reason, time.monotonic() - began_at)

    async def _pause(self, worker: _Supervised, reason: str, ran_s: float) -> None:
        worker.quick_deaths = 1 if ran_s >= _HEALTHY_AFTER_S else worker.quick_deaths + 1
        if worker.quick_deaths >= _MAX_QUICK_DEATHS:
            worker.given_up = True
            self._on_crash("given_up")
            log.error(f"a {self._what} ended too often; giving it up", number=worker.index, reason=reason)
            if all(other.given_up or other.left for other in self._workers):
                self._fail(f"every {self._what} ended too often; the last one: {reason}")
            return
        self._on_crash("restarted")
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (worker.quick_deaths - 1))
        log.warning(f"a {self._what} ended; starting another", number=worker.index, reason=reason, pause_s=pause_s)
        await asyncio.sleep(pause_s)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(WorkerDiedError(reason))


def worker_command(flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "kvrelay", "worker", *flags]


async def first_of(waits: Sequence[asyncio.Future[Any]], *supervisors: Supervisor) -> None:
    """Returns when one of them is done. Raises WorkerDiedError."""
    await asyncio.wait([*waits, *(each.failed for each in supervisors)], return_when=asyncio.FIRST_COMPLETED)
    for supervisor in supervisors:
        if supervisor.failed.done():
            raise supervisor.failed.result()


def stop_signal(at_once: Callable[[], None]) -> asyncio.Event:
    """The first signal stops in order; the second one does not wait for running responses."""
    stop = asyncio.Event()

    def stop_now() -> None:
        if stop.is_set():
            at_once()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_now)
    return stop
