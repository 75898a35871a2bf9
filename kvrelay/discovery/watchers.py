"""The routers that have joined an embedded registry. The registry tells them what it hears of workers (wire/registry.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import ProtocolError
from kvrelay.ids import RouterId, as_router_id
from kvrelay.log import Log
from kvrelay.wire import check_version
from kvrelay.wire.registry import RouterRecord, Watch

log = Log("discovery")

_MAX_WATCHERS = 64
_MAX_SILENCE_S = 600.0


@dataclass(slots=True)
class _Watcher:
    record: RouterRecord
    until: float  # it must be heard again


class Watchers:
    """By the identities of their connections, the oldest first. `own` is the router in the registry's own process, if any."""

    def __init__(self, own: RouterRecord | None, clock: Callable[[], float]) -> None:
        self._own = own
        self._clock = clock
        self._watchers: dict[bytes, _Watcher] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def identities(self) -> list[bytes]:
        return list(self._watchers)

    @property
    def records(self) -> list[RouterRecord]:
        own = [] if self._own is None else [self._own]
        return own + [watcher.record for watcher in self._watchers.values()]

    @property
    def leader(self) -> RouterId | None:
        """The oldest of those that may lead: it stays the leader as long as it is there."""
        return next((record.id for record in self.records if record.may_lead), None)

    def heard(self, identity: bytes, message: Watch) -> None:
        """Raises ProtocolError."""
        router = message.router
        as_router_id(router.id)
        check_version("the router", router.version)
        if not 0.0 < message.silence_s <= _MAX_SILENCE_S:
            raise ProtocolError(f"a silence of {message.silence_s} s is not between 0 and {_MAX_SILENCE_S:g}")
        known = self._watchers.get(identity)
        if known is None and len(self._watchers) >= _MAX_WATCHERS:
            raise ProtocolError(f"there are already {_MAX_WATCHERS} routers")
        if known is None:
            log.info("router joined", router=router.id, pid=router.pid)
        until = self._clock() + message.silence_s
        if known is None or known.record.id != router.id:
            self._watchers[identity] = _Watcher(router, until)
        else:
            known.record, known.until = router, until

    def expire(self) -> None:
        now = self._clock()
        for identity in [identity for identity, watcher in self._watchers.items() if watcher.until <= now]:
            self.lost(identity)

    def grow(self, seconds: float) -> None:
        """This process stood still for this time: what they said meanwhile is still to be read."""
        for watcher in self._watchers.values():
            watcher.until += seconds

    def lost(self, identity: bytes) -> None:
        watcher = self._watchers.pop(identity, None)
        if watcher is not None:
            log.info("router left", router=watcher.record.id)
