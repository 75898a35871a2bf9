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


class Stage(enum.StrEnum):
    """What a worker does for a request at a time: a piece of the request's timeline."""

    QUEUE = "queue"  # waits for its turn, for blocks, or for images
    ENCODE = "encode"  # its images are in the vision tower
    PREFILL = "prefill"  # its prompt is computed, or computed again
    RESERVE = "reserve"  # a decode worker waits until the prompt is begun elsewhere and has blocks for it
    TRANSFER = "transfer"  # KV is on its way to a decode worker; or embeddings on theirs, from an encode worker
    HAND_OVER = "hand_over"  # the prompt is computed, and the decode worker does not have all of it yet
    DECODE = "decode"  # from its first token on
    SWAPPED = "swapped"  # its KV is on the host
    RESTORE = "restore"  # KV is on its way from the host


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
    """Of a transfer of KV, on the side that has it."""

    QUEUED = "queued"  # the request waits; nothing is computed
    STARTED = "started"  # being computed, or computed; the consumer has no blocks for it yet
    SET_ASIDE = "set_aside"  # computed, and its blocks given back to the cache until the consumer has room
    SENDING = "sending"  # the consumer's blocks are known; bytes move as they are computed
    OFFERED = "offered"  # everything is computed; the consumer reads, and says when it is done
    DRAINING = "draining"  # ending: moves under way must end, or the reader must let go, before anything is reused
    DONE = "done"  # the consumer has everything, or does not want it
    FAILED = "failed"  # over without success; nothing is held


class PromptState(enum.StrEnum):
    """Of a prompt that is handed on, where vLLM computes it (worker/vllm/sending.py)."""

    QUEUED = "queued"  # to be computed, for the first time or again
    LENT = "lent"  # the pass that ends it runs, and the relay has its blocks
    OFFERED = "offered"  # computed, and its first tokens told
    ASKED = "asked"  # the same; its peer was asked to do without the blocks for now
    SET_ASIDE = "set_aside"  # its blocks were given back to the cache


class ConsumerState(enum.StrEnum):
    """Of a transfer of KV, on the side that needs it."""

    QUEUED = "queued"  # known; holds no blocks
    STARTING = "starting"  # the producer computes, or has computed: blocks may be reserved
    RESERVED = "reserved"  # holds blocks that are being filled
    DRAINING = "draining"  # ending: its blocks are quarantined until neither the producer nor a read of ours can write them
    DONE = "done"  # every byte is here, or is not wanted any more
    FAILED = "failed"  # over without success; nothing is held


class EmbeddingState(enum.StrEnum):
    """Of the transfer of an embedding, on either side."""

    BOOTSTRAPPING = "bootstrapping"  # not every destination has said where there is room
    WAITING_FOR_INPUT = "waiting_for_input"  # they have; nothing of it has been reported sent
    TRANSFERRING = "transferring"  # a part has arrived; the rest waits for a resume, or is on its way
    DRAINING = "draining"  # ending: memory that a peer or a move of ours may touch is kept until neither can
    SUCCESS = "success"  # every token has arrived everywhere
    FAILED = "failed"  # over without success; nothing is held


class RoundState(enum.StrEnum):
    """Of one round of an embedding, for one destination, on either side."""

    OPEN = "open"  # the consumer has not said where there is room
    ASKED = "asked"  # it has; nothing was sent
    ANNOUNCED = "announced"  # consumer: the producer's notice came
    MOVING = "moving"  # the side that moves is moving
    PARTIAL = "partial"  # producer: answered, and more is to come: waits for a resume
    DONE = "done"  # producer: answered, and that was all: the consumer has not said that it has it
    COMPLETE = "complete"  # the consumer has everything


class LinkState(enum.StrEnum):
    """Of a consumer's connection to a producer."""

    HELLO = "hello"  # hello was said, or will be
    MAPPING = "mapping"  # the producer has let us in; it was told where our memory is
    READY = "ready"  # both know the other's memory: messages about transfers may be sent


class PeerAccess(enum.StrEnum):
    """Whether a peer may touch this side's blocks of a transfer: read a producer's, write a consumer's."""

    NONE = "none"  # it was not told of them, or has let go
    GRANTED = "granted"  # it was told of them


class PeerEnd(enum.StrEnum):
    """What a peer knows of the end of a transfer that failed on this side."""

    UNAWARE = "unaware"  # nothing, as far as is known here
    WAITING = "waiting"  # it ended the transfer itself, and waits until this side says that it has drained
    AWARE = "aware"  # it was told, has drained, or is dead


class EndedBy(enum.StrEnum):
    """Who ended a transfer that did not succeed."""

    OWNER = "owner"  # the engine that expected it: it is told nothing more
    PEER = "peer"  # the other side
    FAULT = "fault"  # a move that failed, silence, a worker that is gone


class WorkerState(enum.StrEnum):
    """Of a worker, as the registry and the router see it."""

    STARTING = "starting"  # loading its model
    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes what it has, takes nothing new
    GONE = "gone"  # left, or did not renew its registration


class FreeReason(enum.StrEnum):
    """Why a request's KV was given back."""

    FINISHED = "finished"  # terminal: every sample has its finish reason
    ABORTED = "aborted"  # terminal: its client left
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
    ON_HOST = "on_host"  # its host blocks are held
    ENDED = "ended"  # its time is over, or it was released


class HandleState(enum.StrEnum):
    """Of a request that a client may continue from, as its router sees it (router/continuations.py)."""

    RUNNING = "running"  # still being generated: a child waits for its end
    HELD = "held"  # a worker keeps its KV for a time
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
    ProducerState.QUEUED: frozenset({ProducerState.STARTED, ProducerState.DRAINING, ProducerState.DONE}),
    ProducerState.STARTED: frozenset(
        {ProducerState.SET_ASIDE, ProducerState.SENDING, ProducerState.OFFERED, ProducerState.DRAINING, ProducerState.DONE}
    ),
    ProducerState.SET_ASIDE: frozenset({ProducerState.STARTED, ProducerState.DRAINING, ProducerState.DONE}),
    ProducerState.SENDING: frozenset({ProducerState.OFFERED, ProducerState.DONE, ProducerState.DRAINING}),
    ProducerState.OFFERED: frozenset({ProducerState.SET_ASIDE, ProducerState.DONE, ProducerState.DRAINING}),
    ProducerState.DRAINING: frozenset({ProducerState.FAILED}),
    ProducerState.DONE: frozenset(),
    ProducerState.FAILED: frozenset(),
}

PROMPT_EDGES: Mapping[PromptState, frozenset[PromptState]] = {
    PromptState.QUEUED: frozenset({PromptState.LENT}),
    PromptState.LENT: frozenset({PromptState.OFFERED}),
    PromptState.OFFERED: frozenset({PromptState.ASKED}),
    PromptState.ASKED: frozenset({PromptState.SET_ASIDE}),
    PromptState.SET_ASIDE: frozenset({PromptState.QUEUED}),
}

CONSUMER_EDGES: Mapping[ConsumerState, frozenset[ConsumerState]] = {
    ConsumerState.QUEUED: frozenset({ConsumerState.STARTING, ConsumerState.DONE, ConsumerState.DRAINING}),
    ConsumerState.STARTING: frozenset({ConsumerState.RESERVED, ConsumerState.DONE, ConsumerState.DRAINING}),
    ConsumerState.RESERVED: frozenset({ConsumerState.DONE, ConsumerState.DRAINING}),
    ConsumerState.DRAINING: frozenset({ConsumerState.FAILED}),
    ConsumerState.DONE: frozenset(),
    ConsumerState.FAILED: frozenset(),
}

EMBEDDING_EDGES: Mapping[EmbeddingState, frozenset[EmbeddingState]] = {
    EmbeddingState.BOOTSTRAPPING: frozenset({EmbeddingState.WAITING_FOR_INPUT, EmbeddingState.DRAINING}),
    EmbeddingState.WAITING_FOR_INPUT: frozenset({EmbeddingState.SUCCESS, EmbeddingState.TRANSFERRING, EmbeddingState.DRAINING}),
    EmbeddingState.TRANSFERRING: frozenset({EmbeddingState.SUCCESS, EmbeddingState.DRAINING}),
    EmbeddingState.DRAINING: frozenset({EmbeddingState.FAILED}),
    EmbeddingState.SUCCESS: frozenset(),
    EmbeddingState.FAILED: frozenset(),
}

ROUND_EDGES: Mapping[RoundState, frozenset[RoundState]] = {
    RoundState.OPEN: frozenset({RoundState.ASKED}),
    RoundState.ASKED: frozenset({RoundState.ANNOUNCED, RoundState.MOVING, RoundState.PARTIAL, RoundState.DONE}),
    RoundState.ANNOUNCED: frozenset({RoundState.MOVING, RoundState.ASKED, RoundState.COMPLETE}),
    RoundState.MOVING: frozenset({RoundState.ASKED, RoundState.PARTIAL, RoundState.DONE, RoundState.COMPLETE}),
    RoundState.PARTIAL: frozenset({RoundState.ASKED}),
    RoundState.DONE: frozenset({RoundState.COMPLETE}),
    RoundState.COMPLETE: frozenset(),
}

LINK_EDGES: Mapping[LinkState, frozenset[LinkState]] = {
    LinkState.HELLO: frozenset({LinkState.MAPPING}),
    LinkState.MAPPING: frozenset({LinkState.READY, LinkState.HELLO}),
    LinkState.READY: frozenset({LinkState.HELLO}),
}

PEER_ACCESS_EDGES: Mapping[PeerAccess, frozenset[PeerAccess]] = {
    PeerAccess.NONE: frozenset({PeerAccess.GRANTED}),
    PeerAccess.GRANTED: frozenset({PeerAccess.NONE}),
}

PEER_END_EDGES: Mapping[PeerEnd, frozenset[PeerEnd]] = {
    PeerEnd.UNAWARE: frozenset({PeerEnd.WAITING, PeerEnd.AWARE}),
    PeerEnd.WAITING: frozenset({PeerEnd.AWARE}),
    PeerEnd.AWARE: frozenset({PeerEnd.WAITING}),
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
    PromptState,
    ConsumerState,
    EmbeddingState,
    RoundState,
    LinkState,
    PeerAccess,
    PeerEnd,
    WorkerState,
    BreakerState,
    KeptState,
    HandleState,
)


def advance(edges: Mapping[S, frozenset[S]], current: S, following: S) -> S:
    """The one way to change a state: returns `following`, or fails if no edge leads there."""
    assert following in edges[current], f"{type(current).__name__}: no edge {current.value} -> {following.value}"
    return following
