"""What an engine needs of the transfer layer. The engine decides who gets blocks when; the mover talks to the peer and moves
bytes, in a thread of its own; the engine learns what happened by polling once per step. No call blocks.

A prefill worker's engine drives a `Producer`:

    expect -> start(blocks) -> begin_step / layer_done / end_step ... -> finish(first tokens) -> poll: released
    set_aside asks for the blocks of a prompt that the consumer has not reserved for (poll: set_aside; no answer: the consumer
    was quicker, and the transfer goes on). Should it reserve later, poll says restart, and the prompt is computed again from
    the cache: start(blocks), steps, finish.
    released may come at any time, also while the prompt waits or is being computed: the consumer does not want it, or failed.
    It is said once, and afterwards every call about the request is harmless.

A decode worker's engine drives a `Consumer`:

    expect -> poll: started -> reserve(blocks) -> poll: arrived, with the first tokens or an error -> (error) poll: freed

After abort, or an arrival with an error, the blocks given to `reserve` may be written by the peer until poll says freed (or,
where the last byte crossed the abort, arrived without an error).
A reserve that crosses the end of its transfer is answered by freed at once, before or after the arrival with the error.
Every expected request ends in exactly one of: released for good (producer), arrived (consumer), or aborted by the engine.
A mover that is broken for good ends them all, and raises when it is polled once more: the worker cannot go on.

What is handed over is all that is known of one sequence: its prompt, and the output that another worker made if it is resumed.
`num_tokens` counts both; the first tokens are those that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from kvrelay.engine.fence import Fence
from kvrelay.ids import RequestId, WorkerId
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import FirstToken, TransferInfo


@dataclass(slots=True)
class ProducerNews:
    """Since the last poll."""

    released: list[RequestId] = field(default_factory=list)  # for good: these requests' blocks are not read any more
    set_aside: list[RequestId] = field(default_factory=list)  # granted: the blocks are not read, the transfer goes on
    restart: list[RequestId] = field(default_factory=list)  # set aside, and now wanted: compute again
    failed: list[tuple[RequestId, str]] = field(default_factory=list)  # the consumer is gone or refused; also in `released`
    sent_bytes: dict[RequestId, int] = field(default_factory=dict)  # of those that were handed over; also in `released`


@dataclass(frozen=True, slots=True)
class Arrival:
    """A transfer ended on the consumer's side. With an error, nothing that arrived may be used."""

    request_id: RequestId
    first_tokens: list[FirstToken]
    error: str = ""
    by_producer: bool = False  # it ended the transfer itself, and tells its router why


@dataclass(slots=True)
class ConsumerNews:
    """Since the last poll."""

    started: list[RequestId] = field(default_factory=list)  # blocks may be reserved now
    arrived: list[Arrival] = field(default_factory=list)
    freed: list[RequestId] = field(default_factory=list)  # blocks of an aborted or failed transfer are safe again


class Mover(Protocol):
    """What both sides have. Called by the engine's thread."""

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None: ...

    def abort(self, request_id: RequestId) -> None:
        """Harmless if over. Blocks that were given or reserved come back through poll: released (or set_aside, where that
        crossed it), or freed."""

    def peer_lost(self, worker_id: WorkerId) -> None:
        """The peer is gone, says a router, which may be wrong: every transfer with it fails now. Memory that it might still
        write is safe only once its death is proven."""

    @property
    def has_news(self) -> bool:
        """Whether `poll` would say anything."""

    def counts(self) -> TransferCounts: ...

    def mapping(self) -> MappingCounts: ...

    @property
    def num_links(self) -> int:
        """Workers that KV is exchanged with at present."""

    def close(self) -> None: ...


class Producer(Mover, Protocol):
    def start(self, request_id: RequestId, blocks: Sequence[int], num_computed: int, fence: Fence) -> None:
        """The prompt has all its blocks; the first `num_computed` tokens are in them (from the prefix cache) once the fence
        has passed."""

    def begin_step(self, rows: Sequence[tuple[RequestId, int]]) -> None:
        """A forward pass starts that computes each request's tokens up to the given count."""

    def layer_done(self, layer: int, fence: Fence) -> None:
        """The pass has stored this layer's KV for all its rows once the fence has passed. Called in the middle of the pass:
        cheap."""

    def end_step(self) -> None:
        """Everything of the pass was launched. Its layers' fences may not have passed yet."""

    def finish(self, request_id: RequestId, first_tokens: list[FirstToken]) -> None: ...

    def set_aside(self, request_id: RequestId) -> None:
        """Asks for the blocks back. Answered by poll: set_aside, or not at all if the consumer has reserved or pulled."""

    def poll(self) -> ProducerNews: ...


class Consumer(Mover, Protocol):
    def reserve(self, request_id: RequestId, blocks: Sequence[int], skip_tokens: int, fence: Fence) -> None:
        """Blocks for the tokens from `skip_tokens` on, which is a multiple of the block size; there may be more than they need.
        A pass that was launched for a sequence which had them before may still write them until the fence has passed."""

    def poll(self) -> ConsumerNews: ...


class NoRelay:
    """A `Producer` and a `Consumer` of an engine that neither hands KV on nor takes any over: its admission refuses every
    hand-over, so that none is ever begun here."""

    has_news = False
    num_links = 0

    def abort(self, request_id: RequestId) -> None:
        pass

    def peer_lost(self, worker_id: WorkerId) -> None:
        pass

    def counts(self) -> TransferCounts:
        return TransferCounts()

    def mapping(self) -> MappingCounts:
        return MappingCounts()

    def close(self) -> None:
        pass

    def _never(self, *_: object) -> NoReturn:
        raise AssertionError("this engine has no relay")

    expect = start = begin_step = layer_done = end_step = finish = set_aside = reserve = poll = _never
