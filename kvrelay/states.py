"""Every state machine, each member in a line, and which state may follow which. Change a state through `advance` only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar


class Role(enum.StrEnum):
    """What a worker does for a request."""

    WHOLE = "whole"  # prefill and decode
    PREFILL = "prefill"  # computes prompts, hands their KV on
    DECODE = "decode"  # receives KV, generates
    ENCODE = "encode"  # turns images into embeddings


class RequestState(enum.StrEnum):
    """Of a sequence in an engine: one prompt with one growing output."""

    WAITING = "waiting"  # queued; holds no blocks
    TRANSFERRING = "transferring"  # holds blocks that a transfer is filling
    RUNNING = "running"  # holds blocks; takes part in steps
    SWAPPED = "swapped"  # its KV is on the host
    FINISHED = "finished"  # has its one FinishReason; holds nothing


class KVState(enum.StrEnum):
    """Of a sequence's KV cache."""

    ALLOCATED = "allocated"  # has blocks, nothing computed into them yet
    ACTIVE = "active"  # blocks on the device hold KV
    SWAPPED = "swapped"  # blocks on the host hold KV
    FREED = "freed"  # has no blocks


class FinishReason(enum.StrEnum):
    """Why a sequence ended. Exactly one per sequence."""

    STOP = "stop"  # end-of-text token, stop token or stop string
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the client left or asked for it
    ERROR = "error"  # could not be served; the failure says why


class ProducerState(enum.StrEnum):
    """Of a transfer, on the side that has the KV."""

    UNKNOWN = "unknown"  # never heard of it here, or long over
    QUEUED = "queued"  # the request waits; nothing is computed
    STARTED = "started"  # being computed, or computed, or parked in the cache; the consumer has no blocks for it yet
    SENDING = "sending"  # the consumer's blocks are known; bytes move as they are computed
    OFFERED = "offered"  # everything is computed; the consumer reads, and says when it is done
    DRAINING = "draining"  # aborted; moves under way must end, or the reader must let go, before anything is reused
    DONE = "done"  # the consumer has everything, or does not want it
    FAILED = "failed"  # over without success; nothing is held


class ConsumerState(enum.StrEnum):
    """Of a transfer, on the side that needs the KV."""

    QUEUED = "queued"  # known; holds no blocks
    STARTING = "starting"  # the producer computes, or has computed: blocks may be reserved
    RESERVED = "reserved"  # holds blocks that are being filled
    DRAINING = "draining"  # aborted; its blocks are quarantined until nobody can write them
    DONE = "done"  # every byte is here, or is not wanted any more
    FAILED = "failed"  # over without success; nothing is held


class WorkerState(enum.StrEnum):
    """Of a worker, as the registry and the router see it."""

    STARTING = "starting"  # loading its model
    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes what it has, takes nothing new
    GONE = "gone"  # left, or its lease ended


REQUEST_EDGES: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.TRANSFERRING, RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.TRANSFERRING: frozenset({RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.SWAPPED, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.SWAPPED: frozenset({RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}

KV_EDGES: Mapping[KVState, frozenset[KVState]] = {
    KVState.FREED: frozenset({KVState.ALLOCATED}),
    KVState.ALLOCATED: frozenset({KVState.ACTIVE, KVState.FREED}),
    KVState.ACTIVE: frozenset({KVState.SWAPPED, KVState.FREED}),
    KVState.SWAPPED: frozenset({KVState.ACTIVE, KVState.FREED}),
}

PRODUCER_EDGES: Mapping[ProducerState, frozenset[ProducerState]] = {
    ProducerState.UNKNOWN: frozenset({ProducerState.QUEUED}),
    ProducerState.QUEUED: frozenset({ProducerState.STARTED, ProducerState.FAILED, ProducerState.DONE}),
    ProducerState.STARTED: frozenset({ProducerState.SENDING, ProducerState.OFFERED, ProducerState.FAILED, ProducerState.DONE}),
    ProducerState.SENDING: frozenset(
        {ProducerState.STARTED, ProducerState.OFFERED, ProducerState.DONE, ProducerState.DRAINING, ProducerState.FAILED}
    ),
    ProducerState.OFFERED: frozenset({ProducerState.STARTED, ProducerState.DONE, ProducerState.DRAINING, ProducerState.FAILED}),
    ProducerState.DRAINING: frozenset({ProducerState.FAILED}),
    ProducerState.DONE: frozenset(),
    ProducerState.FAILED: frozenset(),
}

CONSUMER_EDGES: Mapping[ConsumerState, frozenset[ConsumerState]] = {
    ConsumerState.QUEUED: frozenset({ConsumerState.STARTING, ConsumerState.DONE, ConsumerState.FAILED}),
    ConsumerState.STARTING: frozenset({ConsumerState.RESERVED, ConsumerState.DONE, ConsumerState.FAILED}),
    ConsumerState.RESERVED: frozenset({ConsumerState.STARTING, ConsumerState.DONE, ConsumerState.DRAINING}),
    ConsumerState.DRAINING: frozenset({ConsumerState.FAILED}),
    ConsumerState.DONE: frozenset(),
    ConsumerState.FAILED: frozenset(),
}

WORKER_EDGES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.DRAINING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}

S = TypeVar("S", RequestState, KVState, ProducerState, ConsumerState, WorkerState)


def advance(edges: Mapping[S, frozenset[S]], current: S, following: S) -> S:
    """The one way to change a state: returns `following`, or fails if no edge leads there."""
    assert following in edges[current], f"{type(current).__name__}: no edge {current.value} -> {following.value}"
    return following
