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


class EmbeddingState(enum.StrEnum):
    """Of the transfer of an embedding, on either side."""

    BOOTSTRAPPING = "bootstrapping"  # not every destination has said where there is room
    WAITING_FOR_INPUT = "waiting_for_input"  # they have; nothing of it has been reported sent
    TRANSFERRING = "transferring"  # a part has arrived; the rest waits for a resume, or is on its way
    SUCCESS = "success"  # every token has arrived everywhere
    FAILED = "failed"  # over without success; memory that a peer may touch is kept until it cannot


class WorkerState(enum.StrEnum):
    """Of a worker, as the registry and the router see it."""

    STARTING = "starting"  # loading its model
    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes what it has, takes nothing new
    GONE = "gone"  # left, or its lease ended


class FreeReason(enum.StrEnum):
    """Why a request's KV was given back."""

    FINISHED = "finished"  # terminal: every sample has its finish reason
    ABORTED = "aborted"  # terminal: nobody wants it any more
    FAILED = "failed"  # terminal: it could not be served
    HANDED_OVER = "handed_over"  # terminal here: another worker goes on
    ROLLED_BACK = "rolled_back"  # allocated, but the step's budget had no room for it
    PREEMPTED = "preempted"  # swapping is off: its KV is computed again
    NO_SWAP_ROOM = "no_swap_room"  # the host pool is full: its KV is computed again
    SWAP_OUT_TIMEOUT = "swap_out_timeout"  # the copy to the host did not end in time
    SWAP_IN_TIMEOUT = "swap_in_timeout"  # the copy from the host did not end in time


class KeptState(enum.StrEnum):
    """Of the kept KV of a finished sample, on its worker (engine/memory/kept.py)."""

    ON_DEVICE = "on_device"  # its blocks are pinned
    LEAVING = "leaving"  # they are being copied to the host, since others need the room
    ON_HOST = "on_host"  # its host slots are held
    ENDED = "ended"  # its time is over, or nobody wants it any more


class HandleState(enum.StrEnum):
    """Of a request that a client may continue from, as its router sees it (router/continuations.py)."""

    RUNNING = "running"  # still being generated: a child waits for its end
    HELD = "held"  # a worker keeps its KV under a lease
    KNOWN = "known"  # its tokens are known: a child costs what the prefix cache does not have
    GONE = "gone"  # nothing is left but the reason


class BreakerState(enum.StrEnum):
    """Whether requests are sent to a service that has failed (discovery/breaker.py)."""

    CLOSED = "closed"  # requests pass
    OPEN = "open"  # none do, for a while
    HALF_OPEN = "half_open"  # one does, to find out


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

EMBEDDING_EDGES: Mapping[EmbeddingState, frozenset[EmbeddingState]] = {
    EmbeddingState.BOOTSTRAPPING: frozenset({EmbeddingState.WAITING_FOR_INPUT, EmbeddingState.FAILED}),
    EmbeddingState.WAITING_FOR_INPUT: frozenset({EmbeddingState.SUCCESS, EmbeddingState.TRANSFERRING, EmbeddingState.FAILED}),
    EmbeddingState.TRANSFERRING: frozenset({EmbeddingState.SUCCESS, EmbeddingState.FAILED}),
    EmbeddingState.SUCCESS: frozenset(),
    EmbeddingState.FAILED: frozenset(),
}

WORKER_EDGES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.DRAINING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}

BREAKER_EDGES: Mapping[BreakerState, frozenset[BreakerState]] = {
    BreakerState.CLOSED: frozenset({BreakerState.OPEN}),
    BreakerState.OPEN: frozenset({BreakerState.HALF_OPEN}),
    BreakerState.HALF_OPEN: frozenset({BreakerState.CLOSED, BreakerState.OPEN}),
}

KEPT_EDGES: Mapping[KeptState, frozenset[KeptState]] = {
    KeptState.ON_DEVICE: frozenset({KeptState.LEAVING, KeptState.ENDED}),
    KeptState.LEAVING: frozenset({KeptState.ON_DEVICE, KeptState.ON_HOST, KeptState.ENDED}),
    KeptState.ON_HOST: frozenset({KeptState.ENDED}),
    KeptState.ENDED: frozenset(),
}

HANDLE_EDGES: Mapping[HandleState, frozenset[HandleState]] = {
    HandleState.RUNNING: frozenset({HandleState.HELD, HandleState.KNOWN, HandleState.GONE}),
    HandleState.HELD: frozenset({HandleState.KNOWN, HandleState.GONE}),
    HandleState.KNOWN: frozenset({HandleState.GONE}),
    HandleState.GONE: frozenset(),
}

S = TypeVar(
    "S",
    RequestState,
    KVState,
    ProducerState,
    ConsumerState,
    EmbeddingState,
    WorkerState,
    BreakerState,
    KeptState,
    HandleState,
)


def advance(edges: Mapping[S, frozenset[S]], current: S, following: S) -> S:
    """The one way to change a state: returns `following`, or fails if no edge leads there."""
    assert following in edges[current], f"{type(current).__name__}: no edge {current.value} -> {following.value}"
    return following
