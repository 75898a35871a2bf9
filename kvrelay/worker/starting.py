"""A worker that loads is registered already, as `starting`: requests that lost their worker wait for it (router/failover.py).

    with announced(registration, record, registration_s):    a thread registers and renews meanwhile
        load                                                  if that fails, the worker leaves

Afterwards the heartbeat registers the same worker as `ready`, with the addresses that it has by then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvrelay.discovery.base import Registration
from kvrelay.errors import ProtocolError
from kvrelay.log import Log
from kvrelay.states import WorkerState
from kvrelay.wire.registry import WorkerRecord

log = Log("worker")

_LEAST_S = 10.0  # libraries that load keep other threads from running for seconds


@contextlib.contextmanager
def announced(registration: Registration, record: WorkerRecord, registration_s: float) -> Iterator[None]:
    """Only the thread touches the registration meanwhile."""
    assert record.state is WorkerState.STARTING
    over, ttl_s = threading.Event(), max(registration_s, _LEAST_S)
    thread = threading.Thread(target=_announce, args=(registration, record, ttl_s, over), name="starting", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        _end(thread, over)
        registration.leave()
        raise
    _end(thread, over)


def _end(thread: threading.Thread, over: threading.Event) -> None:
    over.set()
    thread.join()  # no call to a registry takes long


def _announce(registration: Registration, record: WorkerRecord, ttl_s: float, over: threading.Event) -> None:
    is_registered = False
    try:
        while not over.is_set():
            if is_registered:
                registration.renew(record.state, record.load)
            else:
                is_registered = registration.register(record, ttl_s)
            over.wait(ttl_s / 3 if is_registered else 0.1)
    except ProtocolError as error:  # the heartbeat will hear it again, and the worker ends then
        log.debug("the registry refuses this worker", reason=error)
