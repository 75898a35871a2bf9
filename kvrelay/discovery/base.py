"""Who is alive. A worker holds a `Registration`; a router holds a `Membership`. Every registry implements both.

    worker (a thread of its own)                    router (its event loop)
      register(record, ttl_s)  -------------------->  on_joined(record)
      renew(state, load) every ttl/3  ------------->  on_changed(record)       state or load is new
      leave()  ------------------------------------>  on_left(worker_id, Loss.LEFT)
      silent for ttl_s  --------------------------->  on_left(worker_id, Loss.EXPIRED)

For each worker the router hears joined, then any number of changed, then left; after that the same worker may join again
(it was only slow, or the registry restarted). A `WorkerId` names one incarnation, so a restarted process is another worker.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Callable
from typing import Protocol

from kvrelay.ids import RouterId, WorkerId
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import RouterRecord, WorkerLoad, WorkerRecord


class Loss(enum.StrEnum):
    """Why a worker is no longer a member."""

    LEFT = "left"  # it said so
    EXPIRED = "expired"  # it did not renew its registration in time


OnJoined = Callable[[WorkerRecord], None]
OnChanged = Callable[[WorkerRecord], None]
OnLeft = Callable[[WorkerId, Loss], None]


class Registration(Protocol):
    """The worker's side. Not thread-safe: one thread drives it. No call blocks for longer than about `timeout_s`.

    False means that the registry did not answer: the caller tries again. A registry that refuses the worker raises
    ProtocolError (VersionMismatchError if it speaks another version): trying again would not help.
    """

    def register(self, record: WorkerRecord, ttl_s: float) -> bool: ...

    def renew(self, state: WorkerState, load: WorkerLoad) -> bool:
        """Only after `register`. A registry that forgot the worker (it restarted) is told everything again."""

    def leave(self) -> None:
        """Best effort; harmless before `register`."""

    def close(self) -> None: ...


class Membership(Protocol):
    """The router's side. The callbacks run on the event loop that called `start` and must not raise."""

    @property
    def address(self) -> str:
        """Where workers register; empty if they need not."""

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        """Once, on a running loop. What was already registered is joined soon after."""

    def close(self) -> None:
        """No callback runs afterwards."""


class Company(Protocol):
    """The routers that share the workers, as far as the registry tells."""

    @property
    def is_shared(self) -> bool:
        """Whether other routers may use the same workers."""

    @property
    def routers(self) -> list[RouterRecord]:
        """All that the registry knows of, the oldest first; of a registry that lists none, this one."""

    @property
    def leader(self) -> RouterId | None:
        """Which of them takes the decisions of which a cluster needs exactly one; None: none does, or it is not known."""

    def close(self) -> None: ...


def router_record(router_id: RouterId, *, may_lead: bool = False) -> RouterRecord:
    """Of a router in this process."""
    return RouterRecord(id=router_id, host=socket.gethostname(), pid=os.getpid(), version=PROTOCOL_VERSION, may_lead=may_lead)


class Alone:
    """Of a registry that lists no routers. `is_shared`: there may be others nevertheless."""

    def __init__(self, router: RouterRecord, *, is_shared: bool = False) -> None:
        self.routers = [router]
        self.is_shared = is_shared

    @property
    def leader(self) -> RouterId | None:
        return self.routers[0].id if self.routers[0].may_lead else None

    def close(self) -> None:
        pass
