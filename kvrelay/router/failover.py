"""What becomes of a request whose worker is gone or could not go on.

    judge      whose fault is an error that a worker reports: the client's, the worker's, or of no concern any more
    Stranded   requests that have no worker, and none is up: tried again as soon as one is, for a while, and for longer while
               one that they need is starting
    Estranged  pairs of workers between which a hand-over has failed: not tried again for a while

A request that breaks two workers is not given to a third: it may be what breaks them.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.errors import HandOverError, InternalError, MissingEmbeddingError, RequestError, UnavailableError
from kvrelay.ids import WorkerId
from kvrelay.router.attempt import OpenRequest, Plan
from kvrelay.router.peer import Peer

_ESTRANGED_S = 15.0  # then one request finds out whether they have come together
_LOOK_EVERY_S = 0.2  # room in a queue comes without any word


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryRules:
    max_retries: int = 5
    wait_s: float = 10.0  # how long a request that lost its worker waits for another
    start_wait_s: float = 120.0  # how long a request waits while a worker that it needs is starting


class Verdict(enum.Enum):
    """What an error of one leg means for its request."""

    CLIENT = enum.auto()  # the request cannot be served as it is: the client is told
    FINAL = enum.auto()  # the worker's fault, but no other would do better
    RETRY = enum.auto()  # another worker may do better
    IGNORE = enum.auto()  # the leg is not needed any more


def judge(error: RequestError, *, is_decode: bool, is_generating: bool, num_internal_errors: int) -> Verdict:
    """`is_decode`: the decode leg failed. `is_generating`: it has given an output, so it needs no other leg."""
    if not is_decode and is_generating:
        return Verdict.IGNORE
    if isinstance(error, UnavailableError):
        return Verdict.RETRY
    if isinstance(error, InternalError):
        return Verdict.RETRY if num_internal_errors == 0 else Verdict.FINAL
    return Verdict.CLIENT


def num_setbacks(entry: OpenRequest, error: RequestError) -> int:
    """Failures of a request since its last token, this one included. After a new token it is no failure that a worker under
    pressure gave up the KV of images, which it cannot compute again."""
    num_tokens = sum(len(entry.stream.tokens(sample)) for sample in range(entry.request.params.n))
    got_on, entry.num_tokens_then = num_tokens > entry.num_tokens_then, num_tokens
    if not got_on:
        return entry.num_setbacks + 1
    return 0 if isinstance(error, MissingEmbeddingError) and not error.digest else 1


def as_told(error: RequestError) -> RequestError:
    """What a client hears at the end, which knows of no workers."""
    is_internal = isinstance(error, MissingEmbeddingError | HandOverError)
    return UnavailableError(error.message, code=error.code) if is_internal else error


class Estranged:
    """Each worker may be well and reachable from here, and yet not from the other. Then the one that generates computes the
    prompt itself, until the pair is tried again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, on_avoided: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._on_avoided = on_avoided
        self._until: dict[tuple[WorkerId, WorkerId], float] = {}

    def blame(self, entry: OpenRequest, plan: Plan, peer: Peer, error: RequestError) -> None:
        """The leg on `peer` failed. A hand-over that failed is put down to its producer, and so is an embedding that did not
        come; one that is gone from where it was is put down to no worker."""
        blamed = [peer]
        if isinstance(error, MissingEmbeddingError):
            blamed = [share.peer for share in plan.encode if share.has(error.digest)]
        elif plan.prefill is not None and isinstance(error, HandOverError):
            if error.by_producer:  # the two do reach each other; what ailed the producer, it says itself
                entry.avoid.add(plan.prefill.id)
                return
            blamed = [plan.prefill]
            self.add(plan.prefill, peer)
        for each in blamed:
            each.breaker.failed()
            entry.avoid.add(each.id)

    def add(self, prefill: Peer, decode: Peer) -> None:
        now = self._clock()
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        self._until[prefill.id, decode.id] = now + _ESTRANGED_S

    def forgive(self, worker_id: WorkerId) -> None:
        """It was out of reach and is back: that is what was wrong."""
        self._until = {pair: until for pair, until in self._until.items() if worker_id not in pair}

    def mend(self, plan: Plan) -> Plan:
        if not self._until or plan.prefill is None:  # the usual case
            return plan
        until = self._until.get((plan.prefill.id, plan.decode.id), 0.0)
        if until <= self._clock():
            return plan
        self._on_avoided()
        return Plan(plan.decode)


@dataclass(slots=True)
class _Waiting:
    entry: OpenRequest
    error: RequestError  # why it has no worker
    since: float
    alone_since: float  # since when no worker that it needs has been starting


@dataclass(slots=True, eq=False)
class Stranded:
    """Holds requests without a worker. On the loop that made the first of them wait."""

    rules: RetryRules
    retry: Callable[[OpenRequest], bool]
    is_starting: Callable[[OpenRequest], bool]  # whether a worker that it needs is
    _waiting: dict[str, _Waiting] = field(default_factory=dict, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, entry: OpenRequest, error: RequestError) -> None:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(entry, error, loop.time(), loop.time())
        if self._gave_up(waiting, loop.time()):
            return
        self._waiting[entry.stream.request_id] = waiting
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_EVERY_S, self._look)

    def discard(self, entry: OpenRequest) -> None:
        self._waiting.pop(entry.stream.request_id, None)

    def try_now(self) -> None:
        """A worker may have come up."""
        for request_id, waiting in list(self._waiting.items()):
            if request_id in self._waiting and self.retry(waiting.entry):
                self._waiting.pop(request_id, None)

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        self.try_now()
        loop = asyncio.get_running_loop()
        for waiting in list(self._waiting.values()):
            self._gave_up(waiting, loop.time())
        if self._waiting:
            self._timer = loop.call_later(_LOOK_EVERY_S, self._look)

    def _gave_up(self, waiting: _Waiting, now: float) -> bool:
        """Ends a request that has waited for long enough, and says for what."""
        if self.is_starting(waiting.entry):
            waiting.alone_since = now
            if now - waiting.since < max(self.rules.start_wait_s, self.rules.wait_s):
                return False
            waited = f"a worker is starting, but was not up within {self.rules.start_wait_s:g} s"
        elif now - waiting.alone_since < self.rules.wait_s:
            return False
        else:
            waited = f"no other worker came up within {self.rules.wait_s:g} s"
        self.discard(waiting.entry)
        waiting.entry.stream.fail(UnavailableError(f"{waiting.error.message}; {waited}", code=waiting.error.code))
        return True
