"""The thread that keeps a worker registered.

It runs beside the engine, so a long step does not look like death; and it watches the engine, so a stuck one does: while a
step takes longer than `watchdog_s` nothing is renewed, the registration runs out, and routers send their requests elsewhere. A
process that stood still renews nothing either (worker/vigil.py): it comes back as another worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvrelay.discovery.base import Registration
from kvrelay.errors import ProtocolError
from kvrelay.log import Log
from kvrelay.wire.registry import WorkerRecord
from kvrelay.worker.status import Status
from kvrelay.worker.vigil import Vigil

log = Log("worker")


@dataclass(eq=False)
class Heartbeat:
    """Registers, renews every third of its time, and leaves. Only its own thread touches the registration."""

    registration: Registration
    record: WorkerRecord
    status: Status
    registration_s: float
    watchdog_s: float
    vigil: Vigil
    on_refused: Callable[[ProtocolError], None]

    def __post_init__(self) -> None:
        self._wake = threading.Event()
        self._stopping = False
        self._changed: WorkerRecord | None = None  # what the registry has not been told
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self) -> None:
        """The state changed: renew now, not at the next turn."""
        self._wake.set()

    def register_again(self, record: WorkerRecord) -> None:
        """The record changed. From the engine's thread."""
        self._changed = record
        self._wake.set()

    def stop(self) -> None:
        """Leaves the registry and ends the thread. Leaves in silence if this incarnation is over."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            self._register()
            while self._goes_on():
                self._pause()
                if self._goes_on():
                    self._renew()
            if not self.vigil.over:
                self.registration.leave()
        except ProtocolError as error:
            self.on_refused(error)
        finally:
            self.registration.close()

    def _goes_on(self) -> bool:
        return not self._stopping and not self.vigil.look()

    def _register(self) -> None:
        told = False
        while self._goes_on() and not self.registration.register(self.record, self.registration_s):
            if not told:
                log.warning("no registry answers; trying until one does (it must hold the same cluster key, or none)")
                told = True
            self._pause()

    def _renew(self) -> None:
        stuck_for_s = self.status.stuck_for_s()
        if stuck_for_s > self.watchdog_s:
            log.error("the engine is stuck; not renewing the registration", seconds=round(stuck_for_s))
        elif not self._say_again():
            log.warning("the registry did not answer; trying again")

    def _say_again(self) -> bool:
        changed, state, load = self._changed, self.status.state, self.status.load
        if changed is None:
            return self.registration.renew(state, load)
        registered = self.registration.register(msgspec.structs.replace(changed, state=state, load=load), self.registration_s)
        if registered and self._changed is changed:
            self._changed = None
        return registered

    def _pause(self) -> None:
        self._wake.wait(self.registration_s / 3)
        self._wake.clear()
