"""What became of the last requests: a timeline each, on this router's clock.

    begin, sent, again, ended    what the dispatcher does with a request
    told                         what a worker did for it (`LegTimes`), by the worker's own clock

Clocks of two hosts differ by any offset. Each answer of a worker bounds it from both sides: the request cannot have come before
it was sent, and the answer cannot have come before it was said. The offset shown is the middle of the narrowest bounds, its
error half of what is left between them. It only moves a stage to its place: how long the stage took is the worker's own time.

The last `capacity` requests are kept, whether they have ended or not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvrelay.ids import RequestId, WorkerId
from kvrelay.metrics import Metrics
from kvrelay.router.stream import RequestStream
from kvrelay.states import Role, Stage
from kvrelay.wire.serving import LegTimes
from kvrelay.wire.timelines import ClockShown, FailoverShown, LegShown, LineState, StageShown, TimelineShown

AskOthers = Callable[[str, str, int], Awaitable[list[TimelineShown]]]  # owner, name and limit, as `about` takes them

_CAPACITY = 1024
_SETTLE_S = 2.0
_DRIFT = 1e-4  # seconds by which two clocks may come apart in a second


@dataclass(slots=True, eq=False)
class ClockOffset:
    """What to add to a worker's time to get ours lies between `low` and `high`."""

    low: float = float("-inf")
    high: float = float("inf")
    _noted_at: float = 0.0

    def note(self, low: float, high: float, now: float) -> None:
        slack = (now - self._noted_at) * _DRIFT
        self._noted_at = now
        self.low, self.high = max(low, self.low - slack), min(high, self.high + slack)
        if self.low > self.high:  # a clock was set, or drifts more than it should
            self.low, self.high = low, high

    @property
    def offset_s(self) -> float:
        return (self.low + self.high) / 2

    @property
    def error_s(self) -> float:
        return (self.high - self.low) / 2


class LegLine(msgspec.Struct, eq=False):
    """One worker's part."""

    worker: WorkerId
    role: Role
    attempt: int
    sent_at: float
    times: LegTimes | None = None  # once it has ended there
    offset_s: float = 0.0
    error_s: float = 0.0

    def stages(self) -> Iterable[tuple[Stage, float, float]]:
        """Each with its beginning on our clock and its own duration."""
        if self.times is not None:
            ends = [at for _, at in self.times.stages[1:]] + [self.times.ended]
            for (stage, at), end in zip(self.times.stages, ends, strict=True):
                yield stage, at + self.offset_s, end - at


class StageLine(NamedTuple):
    """A stage on a worker, or on the router, placed on the router's clock."""

    stage: str
    worker: str
    role: str
    attempt: int
    at: float
    seconds: float


class Timeline(msgspec.Struct, eq=False):
    """One request. Times are of this router's monotonic clock."""

    number: int = 0  # in the order of arrival
    external_id: str = ""
    answer_id: str = ""
    owner: str = ""
    trace_id: str = ""
    span_id: str = ""  # of the request, under which workers do their part
    parent_span_id: str = ""  # of the client
    is_sampled: bool = False  # whether its client wants it recorded
    parent: str = ""  # that it continues from; empty if none
    prompt_tokens: int = 0
    began_at: float = 0.0
    began_unix: float = 0.0
    request_ids: list[RequestId] = []  # of its legs
    legs: list[LegLine] = []
    failovers: list[tuple[float, str]] = []
    transfer_id: str = ""
    stream: RequestStream | None = None  # while it runs, it knows the next two
    first_token_at: float = 0.0
    output_tokens: int = 0
    ended_at: float = 0.0
    state: LineState = "running"
    is_forgotten: bool = False  # others have taken its place

    def stages(self) -> Iterable[StageLine]:
        if self.legs:
            yield StageLine("route", "", "router", 0, self.began_at, self.legs[0].sent_at - self.began_at)
        for leg in self.legs:
            for stage, at, seconds in leg.stages():
                yield StageLine(stage.value, leg.worker, leg.role.value, leg.attempt, at, seconds)

    def progress(self) -> tuple[object, ...]:
        """Changes whenever there is more to tell than further tokens."""
        self.look()
        told = sum(leg.times is not None for leg in self.legs)
        return self.state, self.first_token_at, len(self.legs), told, len(self.failovers)

    def look(self) -> None:
        """How far it has come."""
        if self.stream is not None:
            self.first_token_at, self.output_tokens = self.stream.first_token_at, self.stream.num_tokens

    def end(self, state: LineState, at: float) -> None:
        self.look()
        self.state, self.ended_at, self.stream = state, at, None

    def has_name(self, name: str) -> bool:
        return name in (self.external_id, self.answer_id)


async def _no_others(owner: str, name: str, limit: int) -> list[TimelineShown]:
    return []


class Timelines:
    """Of one router."""

    def __init__(self, metrics: Metrics, *, capacity: int = _CAPACITY, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self.router = ""
        self._capacity = capacity
        self._clock = clock
        self._lines: deque[Timeline] = deque()
        self._num_begun = 0
        self._legs: dict[RequestId, LegLine] = {}
        self._clocks: dict[WorkerId, ClockOffset] = {}
        self._settling: deque[Timeline] = deque()  # ended; their workers may have more to say
        self.on_settled: Callable[[Timeline], None] | None = None
        self.on_close: Callable[[], None] = lambda: None
        self.ask_others: AskOthers = _no_others
        self._histograms = {
            Stage.QUEUE: metrics.queue_seconds,
            Stage.ENCODE: metrics.encode_seconds,
            Stage.PREFILL: metrics.prefill_seconds,
            Stage.RESERVE: metrics.reserve_seconds,
            Stage.TRANSFER: metrics.transfer_seconds,
            Stage.HAND_OVER: metrics.hand_over_seconds,
            Stage.DECODE: metrics.decode_seconds,
            Stage.SWAPPED: metrics.swapped_seconds,
            Stage.RESTORE: metrics.restore_seconds,
        }
        self._observers: dict[tuple[Role, Stage], Callable[[float], None]] = {}  # those that were needed

    def __len__(self) -> int:
        return len(self._lines)

    # What the dispatcher does

    def begin(self, line: Timeline, arrived: float) -> None:
        """`arrived`: when its client asked; 0: now."""
        now = self._clock()
        self._num_begun += 1
        line.number = self._num_begun
        line.began_at = arrived or now
        line.began_unix = time.time() - (now - line.began_at)
        self._lines.append(line)
        if len(self._lines) > self._capacity:
            oldest = self._lines.popleft()
            for request_id in oldest.request_ids:
                del self._legs[request_id]
            oldest.request_ids.clear()
            oldest.is_forgotten = True

    def sent(self, line: Timeline, legs: Iterable[tuple[RequestId, WorkerId, Role]], attempt: int, at: float) -> None:
        """`at`: before the first of them was sent. Later, a worker may have begun already."""
        if line.is_forgotten:
            return
        for request_id, worker, role in legs:
            leg = LegLine(worker, role, attempt, at)
            line.legs.append(leg)
            line.request_ids.append(request_id)
            self._legs[request_id] = leg

    def again(self, line: Timeline, reason: str) -> None:
        line.failovers.append((self._clock(), reason))

    def ended(self, line: Timeline, stream: RequestStream) -> None:
        line.end("aborted" if stream.aborted else "failed" if stream.failed else "finished", self._clock())
        if stream.error is not None:
            self._metrics.request_failures.labels(stream.error.kind).inc()
        self._settle(line)

    def refused(self, line: Timeline) -> None:
        """No worker has it."""
        line.end("failed", self._clock())
        self._settle(line)

    def _settle(self, line: Timeline) -> None:
        if self.on_settled is not None:
            self._settling.append(line)

    def tick(self, settled_after_s: float = _SETTLE_S) -> None:
        """Those that ended so long ago are told; nothing more is expected of their workers."""
        while self._settling and self._settling[0].ended_at + settled_after_s <= self._clock():
            line = self._settling.popleft()
            if self.on_settled is not None:
                self.on_settled(line)

    def close(self) -> None:
        """What has ended is told at once."""
        self.tick(0.0)
        self.on_close()

    # What workers say

    def told(self, worker: WorkerId, role: Role, times: LegTimes) -> None:
        """Also of a leg whose request has ended. Of one that is too old to be known, only its length counts."""
        if not times.stages:
            return
        leg = self._legs.get(times.request_id)
        if leg is not None and leg.worker == worker:
            now = self._clock()
            clock = self._clocks.get(worker) or self._clocks.setdefault(worker, ClockOffset())
            clock.note(leg.sent_at - times.stages[0][1], now - times.ended, now)
            leg.times, leg.offset_s, leg.error_s = times, clock.offset_s, clock.error_s
        previous, began = times.stages[0]
        for stage, at in (*times.stages[1:], (previous, times.ended)):
            observe = self._observers.get((role, previous)) or self._observer(role, previous)
            observe(at - began)
            previous, began = stage, at
        if times.resumed_s:
            self._metrics.embedding_resume_seconds.observe(times.resumed_s)

    def _observer(self, role: Role, stage: Stage) -> Callable[[float], None]:
        observe = self._observers[role, stage] = self._histograms[stage].labels(role.value).observe
        return observe

    def lost(self, worker_id: WorkerId) -> None:
        self._clocks.pop(worker_id, None)

    # What is shown

    async def find(self, owner: str, *, name: str = "", limit: int = 0) -> list[TimelineShown]:
        """The owner's latest, newest first, or, with a name, one for each prompt of the request that has it. Those that
        other routers served are among them."""
        found = _joined([*self.about(owner, name, limit), *await self.ask_others(owner, name, limit)])
        return [line for line in found if name in (line.id, line.answer_id)] if name else found[::-1][:limit]

    def about(self, owner: str, name: str, limit: int) -> list[TimelineShown]:
        """Those that have the name or continue from it; without a name, the latest."""
        if not name:
            return self.latest(owner, limit)
        mine = [line for line in self._lines if line.owner == owner]
        children = _children(mine)
        return [self._describe(line, children) for line in mine if line.has_name(name) or line.parent == name]

    def latest(self, owner: str, limit: int) -> list[TimelineShown]:
        """The owner's, newest first; all if the server asks for no keys."""
        mine = [line for line in reversed(self._lines) if line.owner == owner]
        children = _children(mine)
        return [self._describe(line, children) for line in mine[:limit]]

    def changed(self, owner: str, limit: int, seen: dict[int, tuple[object, ...]]) -> list[TimelineShown]:
        """Of the owner's latest, oldest first, those of which there is more to tell than `seen` knows; then it knows."""
        mine = [line for line in reversed(self._lines) if line.owner == owner]
        children = _children(mine)
        latest = {line.number: line for line in reversed(mine[:limit])}
        progress = {number: (*line.progress(), len(_own(line, children))) for number, line in latest.items()}
        more = [number for number in latest if seen.get(number) != progress[number]]
        seen.clear()
        seen.update(progress)
        return [self._describe(latest[number], children) for number in more]

    def _describe(self, line: Timeline, children: Mapping[str, list[str]]) -> TimelineShown:
        line.look()

        def since(at: float) -> float:
            return round((at - line.began_at) * 1000, 3)

        stages = [
            StageShown(
                stage=one.stage,
                worker=one.worker,
                role=one.role,
                attempt=one.attempt,
                start_ms=since(one.at),
                ms=round(1000 * one.seconds, 3),
            )
            for one in sorted(line.stages(), key=lambda one: one.at)
        ]
        clocks = {
            leg.worker: ClockShown(offset_ms=round(1000 * leg.offset_s, 3), error_ms=round(1000 * leg.error_s, 3))
            for leg in line.legs
            if leg.times is not None
        }
        return TimelineShown(
            number=line.number,
            router=self.router,
            id=line.external_id,
            answer_id=line.answer_id,
            state=line.state,
            arrived_at=round(line.began_unix, 6),
            trace_id=line.trace_id,
            transfer_id=line.transfer_id,
            parent=line.parent,
            children=_own(line, children),
            prompt_tokens=line.prompt_tokens,
            output_tokens=line.output_tokens,
            first_token_ms=since(line.first_token_at) if line.first_token_at else None,
            total_ms=since(line.ended_at or self._clock()),
            failovers=[FailoverShown(at_ms=since(at), reason=reason) for at, reason in line.failovers],
            stages=stages,
            workers=[LegShown(id=leg.worker, role=leg.role.value, attempt=leg.attempt) for leg in line.legs],
            clocks=clocks,
        )


def _joined(lines: Iterable[TimelineShown]) -> list[TimelineShown]:
    """Oldest first, each with its children on whichever router."""
    shown = sorted(lines, key=lambda line: line.arrived_at)
    children: dict[str, list[str]] = {}
    for line in shown:
        children.setdefault(line.parent, []).append(line.id)

    def family(line: TimelineShown) -> list[str]:
        names = [name for name in dict.fromkeys((line.id, line.answer_id)) if name]
        return list(dict.fromkeys([*line.children, *(child for name in names for child in children.get(name, ()))]))

    return [msgspec.structs.replace(line, children=family(line)) for line in shown]


def _children(lines: Sequence[Timeline]) -> dict[str, list[str]]:
    """The requests that continue from another, by the name that they know it by."""
    children: dict[str, list[str]] = {}
    for line in lines:
        if line.parent:
            children.setdefault(line.parent, []).append(line.external_id)
    return children


def _own(line: Timeline, children: Mapping[str, list[str]]) -> list[str]:
    names = dict.fromkeys((line.external_id, line.answer_id))
    return [child for name in names if name for child in children.get(name, ())]
