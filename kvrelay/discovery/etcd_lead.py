"""The routers on one etcd, and which of them leads. All keys of a router end with its etcd lease.

    /kvrelay/routers/{router_id}   its RouterRecord, as workers' records are kept (etcd_members.py)
    /kvrelay/leader                the id of the router that leads

A thread renews the lease, puts a key that is missing, and reads what the others have put. A router that cannot reach etcd leads
no more: what it knew is older than the lease. The other routers that it knew stay.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from kvrelay.discovery.etcd_gateway import (
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
    RangeAnswer,
    RefusedError,
    Transaction,
)
from kvrelay.discovery.etcd_members import read_router, value_of
from kvrelay.errors import ProtocolError
from kvrelay.ids import RouterId
from kvrelay.log import Log
from kvrelay.wire.registry import RouterRecord

log = Log("discovery")

KEY = b"/kvrelay/leader"
ROUTERS = b"/kvrelay/routers/"
_ROUTERS_END = b"/kvrelay/routers0"  # "0" comes after "/"


class EtcdCompany:
    """Of a router on etcd. One that may not lead does not ask who does."""

    is_shared = True

    def __init__(
        self,
        address: str,
        router: RouterRecord,
        *,
        registration_s: float,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self.routers = [router]  # until etcd has told of the others
        self._router = router
        self._ttl_s = max(2, math.ceil(registration_s))
        self._clock = clock
        self._on_retry = on_retry
        self._lease: int | None = None
        self._known: tuple[RouterId, float] | None = None  # the leader, and until when that can be relied on
        self._stop = threading.Event()
        self._gateway = Gateway(Endpoints(address), timeout_s=timeout_s, on_retry=on_retry)
        self._thread = threading.Thread(target=self._run, name="etcd-company", daemon=True)
        self._thread.start()

    @property
    def leader(self) -> RouterId | None:
        known = self._known
        return known[0] if known is not None and self._clock() < known[1] else None

    def close(self) -> None:
        """Another one need not wait for the end of the lease."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                asked_at = self._clock()
                lease = self._renew()
                self.routers = self._listed()
                leader = self._ask_leader(lease) if self._router.may_lead else None
                self._known = None if leader is None else (leader, asked_at + self._ttl_s)
            except (NoAnswerError, RefusedError) as error:
                self._known = None
                self._on_retry()
                log.seldom("etcd does not answer: the known routers stay, and which of them leads is not known", reason=error)
            self._stop.wait(self._ttl_s / 3)
        try:
            if self._lease is not None:
                self._gateway.ask("/v3/lease/revoke", LeaseRequest(lease=self._lease), Done)
        except (NoAnswerError, RefusedError) as error:
            log.seldom("could not leave the other routers; the lease ends by itself", reason=error)
        self._gateway.close()

    def _renew(self) -> int:
        if self._lease is None or not self._gateway.keep_alive(self._lease):
            self._lease = None  # until its key is there, too
            lease = self._gateway.ask("/v3/lease/grant", GrantLease(ttl_s=self._ttl_s), LeaseGranted).lease
            put = Put(key=ROUTERS + self._router.id.encode(), value=value_of(self._router), lease=lease)
            self._gateway.ask("/v3/kv/put", put, Done)
            self._lease = lease
        return self._lease

    def _listed(self) -> list[RouterRecord]:
        everything = Range(key=ROUTERS, range_end=_ROUTERS_END, sort_order="ASCEND", sort_target="CREATE")
        found = []
        for pair in self._gateway.ask("/v3/kv/range", everything, RangeAnswer).kvs:
            try:
                found.append(read_router(pair, ROUTERS))
            except ProtocolError as error:
                log.seldom("ignored in etcd", key=pair.key[:120], reason=error)
        if self._router.id not in {record.id for record in found}:
            self._lease = None  # its key is gone: the next round puts it again
        return found

    def _ask_leader(self, lease: int) -> RouterId | None:
        exists = Compare(key=KEY, target="CREATE", result="GREATER")  # than 0
        put = Operation(request_put=Put(key=KEY, value=self._router.id.encode(), lease=lease))
        self._gateway.ask("/v3/kv/txn", Transaction(compare=[exists], failure=[put]), Done)
        found = self._gateway.ask("/v3/kv/range", Range(key=KEY, range_end=KEY + b"\0"), RangeAnswer).kvs
        return RouterId(found[0].value.decode(errors="replace")) if found else None
