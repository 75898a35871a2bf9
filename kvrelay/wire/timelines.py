"""What became of requests, as GET /requests tells it, and how routers with the same workers ask each other for it:

asking router                    worker                  other routers
  | AskTimelines -------------------> | -- as it is ------> |
  | <---------------- as it is ------ | <-- TimelinesTold -- |   always, even if it is empty
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.ids import RouterId, WorkerId

LineState = Literal["running", "finished", "aborted", "failed"]


class StageShown(msgspec.Struct, frozen=True, kw_only=True):
    """A stage on a worker, or on the router (no `worker`). `start_ms` is by the router's clock, `ms` by the worker's."""

    stage: str
    worker: str
    role: str
    attempt: int
    start_ms: float  # since the request came
    ms: float


class FailoverShown(msgspec.Struct, frozen=True, kw_only=True):
    at_ms: float
    reason: str


class LegShown(msgspec.Struct, frozen=True, kw_only=True):
    id: WorkerId
    role: str
    attempt: int


class ClockShown(msgspec.Struct, frozen=True, kw_only=True):
    """What is added to a worker's time to get the router's, and by how much that may be wrong."""

    offset_ms: float
    error_ms: float


class TimelineShown(msgspec.Struct, frozen=True, kw_only=True):
    """One request, or one prompt of it."""

    number: int  # in the order of arrival at its router
    router: str  # that served it
    id: str
    answer_id: str
    state: LineState
    arrived_at: float  # Unix time
    trace_id: str
    transfer_id: str
    parent: str  # that it continues from; empty if none
    children: list[str]
    prompt_tokens: int
    output_tokens: int
    first_token_ms: float | None
    total_ms: float
    failovers: list[FailoverShown]
    stages: list[StageShown]
    workers: list[LegShown]
    clocks: dict[WorkerId, ClockShown]


class TimelineMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of these messages. A worker passes each on to all other routers."""


class AskTimelines(TimelineMessage, frozen=True, kw_only=True):
    asker: RouterId
    question: int  # of that asker
    owner: str
    name: str = ""  # empty: the latest
    limit: int = 0  # of these


class TimelinesTold(TimelineMessage, frozen=True, kw_only=True):
    asker: RouterId
    question: int
    router: RouterId  # that tells
    timelines: list[TimelineShown]


AboutTimelines = AskTimelines | TimelinesTold
