"""The registry in etcd: workers keep a key under a lease of etcd, any number of routers watch the keys (etcd_members.py).

    worker                                               etcd                      router
      lease/grant, put key under the lease  ------------> |                          | range: all keys, at revision r
      lease/keepalive every ttl/3  ---------------------> |                          | watch from r + 1
      put when state or load are new  ------------------> | -- PUT event ----------> | joined, changed
      put DRAINING, lease/revoke  ----------------------> | -- DELETE event -------> | left
      silent for longer than the lease  ----------------> | -- DELETE event -------> | left (expired)

While etcd is away, workers and routers go on with what they know. When it is back, a router compares what etcd holds with what
it knows; a worker whose lease is gone registers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from kvrelay.discovery.base import OnChanged, OnJoined, OnLeft
from kvrelay.discovery.etcd_gateway import (
    AsyncGateway,
    Compare,
    Done,
    Endpoints,
    Gateway,
    GrantLease,
    LeaseGranted,
    LeaseRequest,
    NoAnswerError,
    Operation,
    Put,
    Range,
    RefusedError,
    Transaction,
    Watch,
    WatchRange,
    new_async_client,
)
from kvrelay.discovery.etcd_members import PREFIX, PREFIX_END, EtcdMembers, key_of, value_of
from kvrelay.discovery.members import check_record, check_ttl
from kvrelay.errors import ProtocolError
from kvrelay.log import Log
from kvrelay.states import WorkerState
from kvrelay.wire.registry import WorkerLoad, WorkerRecord

log = Log("discovery")

_EVERYTHING = Range(key=PREFIX, range_end=PREFIX_END)
_NEWEST = Range(key=PREFIX, range_end=PREFIX_END, limit=1, sort_order="DESCEND", sort_target="MOD", keys_only=True)
_PROBE_EVERY_S = 2.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_HEALTHY_AFTER_S = 10.0  # a connection that lasted longer is made anew without much of a pause
_LOAD_EVERY_S = 1.0  # how often a mere change of load is written
_CHECK_EVERY_S = 10.0  # how often a key is compared with what it should hold


@dataclass(eq=False)
class EtcdMembership:
    """Watches the keys of all workers. `on_reachable` hears whether etcd answers."""

    address: str
    _: KW_ONLY
    registration_s: float
    timeout_s: float = 2.0
    probe_every_s: float = _PROBE_EVERY_S
    on_malformed: Callable[[], None] = lambda: None
    on_reachable: Callable[[bool], None] = lambda _: None
    on_retry: Callable[[], None] = lambda: None
    _loss_told: bool = field(default=False, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _parts: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._endpoints = Endpoints(self.address)

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        assert self._task is None, "started twice"
        members = EtcdMembers(
            on_joined, on_changed, on_left, grace_s=max(self.registration_s, 1.0), on_malformed=self.on_malformed
        )
        self._task = asyncio.get_running_loop().create_task(self._run(members), name="etcd-watch")

    def close(self) -> None:
        """Tasks end at their next turn, in which they only close their connections."""
        for part in self._parts:
            part.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _run(self, members: EtcdMembers) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began_at = time.monotonic()
            try:
                await self._follow(members)
            except (NoAnswerError, RefusedError) as error:
                reason = str(error)
            except Exception as error:  # the border to the HTTP library: whatever it was, a new connection is the cure
                log.exception("the watch of etcd failed unexpectedly")
                reason = repr(error)
            lasted_s = time.monotonic() - began_at
            pause_s = _FIRST_PAUSE_S if lasted_s > _HEALTHY_AFTER_S else min(_LONGEST_PAUSE_S, 2 * pause_s)
            self._lost(reason)
            self._endpoints.next()
            await asyncio.sleep(pause_s)
            self.on_retry()

    async def _follow(self, members: EtcdMembers) -> None:
        """One connection's life: a snapshot, then the watch, and beside it the probe. Ends with an error only."""
        async with new_async_client(self.timeout_s) as client:
            gateway = AsyncGateway(client, self._endpoints.current, timeout_s=self.timeout_s)
            snapshot = await gateway.range(_EVERYTHING)
            members.replace_all(snapshot.kvs, snapshot.header.revision)
            self._found()
            parts = [asyncio.create_task(self._watch(gateway, members)), asyncio.create_task(self._probe(gateway, members))]
            self._parts = parts
            try:
                ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
            for part in ended:
                part.result()

    async def _watch(self, gateway: AsyncGateway, members: EtcdMembers) -> None:
        request = Watch(create_request=WatchRange(key=PREFIX, range_end=PREFIX_END, start_revision=members.revision + 1))
        async with contextlib.aclosing(gateway.watch(request)) as news:
            async for piece in news:
                if piece.canceled:
                    compacted = "what was asked for was compacted" if piece.compact_revision else "no reason given"
                    raise NoAnswerError(f"etcd ended the watch: {piece.cancel_reason or compacted}")
                members.apply(piece.events)

    async def _probe(self, gateway: AsyncGateway, members: EtcdMembers) -> None:
        """Finds an etcd that is stopped or cut off, which a watch does not show, and a watch that is silent although there is
        news: it has told nothing since the last probe, which missed something already."""
        behind_at: int | None = None
        while True:
            await asyncio.sleep(self.probe_every_s)
            answer = await gateway.range(_NEWEST)
            members.expire()  # only while etcd answers: else no worker could have come back
            newest = max((pair.mod_revision for pair in answer.kvs), default=0)
            if members.agrees(answer.count, newest):
                behind_at = None
            elif behind_at == members.revision:
                raise NoAnswerError("the watch is silent although there is news")
            else:
                behind_at = members.revision

    def _found(self) -> None:
        if self._loss_told:
            log.info("etcd answers again", endpoint=self._endpoints.current)
        self._loss_told = False
        self.on_reachable(True)

    def _lost(self, reason: str) -> None:
        if not self._loss_told:
            log.warning("etcd is out of reach; the workers known so far stay", reason=reason)
        self._loss_told = True
        self.on_reachable(False)


class EtcdRegistration:
    """A worker's key and lease. A lease that was granted is kept through failures: a put that etcd carries out late, after we
    gave it up, then ties the key to no other lease than the one we renew."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._gateway = Gateway(Endpoints(address), timeout_s=timeout_s, on_retry=on_retry)
        self._on_retry = on_retry
        self._clock = clock
        self._record: WorkerRecord | None = None
        self._ttl_s = 0
        self._lease: int | None = None
        self._told: WorkerRecord | None = None  # what the key holds; None: unknown
        self._told_at = 0.0
        self._loss_told = False

    def register(self, record: WorkerRecord, ttl_s: float) -> bool:
        check_record(record)
        check_ttl(ttl_s)
        is_other_ttl, self._ttl_s = math.ceil(ttl_s) != self._ttl_s, math.ceil(ttl_s)  # etcd counts whole seconds
        self._record = record
        if is_other_ttl:
            self._lease = None  # the old one ends by itself; the key moves to the new one
        try:
            self._hold(record)
        except RefusedError as error:
            raise ProtocolError(f"etcd refused this worker: {error}") from error
        except NoAnswerError as error:
            return self._failed(error)
        self._loss_told = False
        return True

    def renew(self, state: WorkerState, load: WorkerLoad) -> bool:
        """Once registered, a worker is not stopped by an etcd that refuses: an operator may be changing its settings."""
        assert self._record is not None, "renew before register"
        self._record = msgspec.structs.replace(self._record, state=state, load=load)
        try:
            self._hold(self._record)
        except (NoAnswerError, RefusedError) as error:
            return self._failed(error)
        self._loss_told = False
        return True

    def leave(self) -> None:
        record, lease = self._record, self._lease
        if record is not None and lease is not None:
            try:
                if self._told is None or self._told.state is not WorkerState.DRAINING:
                    self._put(msgspec.structs.replace(record, state=WorkerState.DRAINING), lease)
                self._gateway.ask("/v3/lease/revoke", LeaseRequest(lease=lease), Done)
            except (NoAnswerError, RefusedError) as error:
                log.warning("could not leave etcd; the lease ends by itself", ttl_s=self._ttl_s, reason=error)
        self._record = self._lease = self._told = None

    def close(self) -> None:
        self._gateway.close()

    def _hold(self, record: WorkerRecord) -> None:
        """Afterwards the lease is fresh, and the key under it holds what is due."""
        lease = self._lease
        if lease is None or not self._gateway.keep_alive(lease):
            lease = self._grant()
        if self._is_due(record):
            self._put(record, lease)

    def _grant(self) -> int:
        granted = self._gateway.ask("/v3/lease/grant", GrantLease(ttl_s=self._ttl_s), LeaseGranted)
        if granted.ttl_s > self._ttl_s:
            log.warning("etcd's shortest lease is longer than --registration-s", ttl_s=granted.ttl_s)
        self._lease, self._told = granted.lease, None
        return granted.lease

    def _is_due(self, record: WorkerRecord) -> bool:
        told = self._told
        if told is None or record.state != told.state or record.adapters != told.adapters:
            return True
        age_s = self._clock() - self._told_at
        return age_s >= _CHECK_EVERY_S or (record.load != told.load and age_s >= _LOAD_EVERY_S)

    def _put(self, record: WorkerRecord, lease: int) -> None:
        """Unless it is there already: so a put whose answer was lost, or an operator's `etcdctl del`, is found and mended."""
        self._told = None
        key, value = key_of(record), value_of(record)
        same = [
            Compare(key=key, target="VALUE", result="EQUAL", value=value),
            Compare(key=key, target="LEASE", result="EQUAL", lease=lease),
        ]
        put = Operation(request_put=Put(key=key, value=value, lease=lease))
        self._gateway.ask("/v3/kv/txn", Transaction(compare=same, failure=[put]), Done)
        self._told, self._told_at = record, self._clock()

    def _failed(self, error: Exception) -> bool:
        self._on_retry()
        if not self._loss_told:
            log.warning("etcd does not answer", reason=error)
        self._loss_told = True
        return False
