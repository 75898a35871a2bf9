"""Which of several routers on one etcd leads: the one whose id is under /kvrelay/leader, a key that ends with its etcd lease.

A thread renews the lease, puts the key where there is none, and reads who has it. A router that cannot reach etcd leads no
more: what it knew is older than the lease.
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
from kvrelay.ids import RouterId
from kvrelay.log import Log
from kvrelay.wire.registry import RouterRecord

log = Log("discovery")

KEY = b"/kvrelay/leader"


class EtcdCompany:
    """Of a router on etcd, which lists no routers. One that may not lead does not ask for it either."""

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
        self.routers = [router]
        self._ttl_s = max(2, math.ceil(registration_s))
        self._clock = clock
        self._on_retry = on_retry
        self._lease: int | None = None
        self._known: tuple[RouterId, float] | None = None  # the leader, and until when that can be relied on
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if router.may_lead:
            self._gateway = Gateway(Endpoints(address), timeout_s=timeout_s, on_retry=on_retry)
            self._thread = threading.Thread(target=self._run, name="etcd-lead", daemon=True)
            self._thread.start()

    @property
    def leader(self) -> RouterId | None:
        known = self._known
        return known[0] if known is not None and self._clock() < known[1] else None

    def close(self) -> None:
        """Another one need not wait for the end of the lease."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._known = self._ask()
            except (NoAnswerError, RefusedError) as error:
                self._known = None
                self._on_retry()
                log.seldom("which router leads is not known", reason=error)
            self._stop.wait(self._ttl_s / 3)
        try:
            if self._lease is not None:
                self._gateway.ask("/v3/lease/revoke", LeaseRequest(lease=self._lease), Done)
        except (NoAnswerError, RefusedError) as error:
            log.seldom("could not give up the lead; its lease ends by itself", reason=error)
        self._gateway.close()

    def _ask(self) -> tuple[RouterId, float] | None:
        asked_at = self._clock()
        if self._lease is None or not self._gateway.keep_alive(self._lease):
            self._lease = self._gateway.ask("/v3/lease/grant", GrantLease(ttl_s=self._ttl_s), LeaseGranted).lease
        exists = Compare(key=KEY, target="CREATE", result="GREATER")  # than 0
        put = Operation(request_put=Put(key=KEY, value=self.routers[0].id.encode(), lease=self._lease))
        self._gateway.ask("/v3/kv/txn", Transaction(compare=[exists], failure=[put]), Done)
        found = self._gateway.ask("/v3/kv/range", Range(key=KEY, range_end=KEY + b"\0"), RangeAnswer).kvs
        return (RouterId(found[0].value.decode(errors="replace")), asked_at + self._ttl_s) if found else None
