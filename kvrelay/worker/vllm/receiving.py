"""A decode worker's hand-overs.

begin       the request is known; the core is not told of it
started     (poll) the peer has begun: one sequence of the request waits in the core for blocks
allocated   it has them: they are reserved for the peer, and the core waits
arrived     (poll) the KV is there, with the first token of every sample: the sequence goes on behind one of them; the other
            samples begin as sequences of their own, which find the prompt in the cache
freed       (poll) blocks of a transfer that failed or was aborted are safe again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.fence import Fence
from kvrelay.engine.movers import Arrival, Consumer
from kvrelay.errors import HandOverError, RequestError
from kvrelay.ids import RequestId
from kvrelay.log import Log
from kvrelay.states import CONSUMER_EDGES, ConsumerState, Stage, advance
from kvrelay.wire.serving import FirstToken
from kvrelay.worker.vllm.book import Book
from kvrelay.worker.vllm.requests import Open, Sample
from kvrelay.worker.vllm.seam import CoreOutput, Hooks

log = Log("relay")


@dataclass(slots=True, eq=False)
class _Take:
    open: Open
    state: ConsumerState = ConsumerState.QUEUED
    sequence_id: str = ""  # in the core, from STARTING on
    num_reserved: int = 0  # blocks

    def advance(self, state: ConsumerState) -> None:
        self.state = advance(CONSUMER_EDGES, self.state, state)


class Receiving(Hooks):
    """Implements the engine's `HandOver`."""

    def __init__(self, consumer: Consumer, book: Book) -> None:
        self.mover = consumer
        self._consumer = consumer
        self._book = book
        self._takes: dict[RequestId, _Take] = {}  # until arrived, failed or aborted
        self._by_sequence: dict[str, _Take] = {}
        self._freed: set[RequestId] = set()  # said to be safe before the transfer was said to have failed
        self._quarantined: dict[RequestId, _Take] = {}

    # What the engine does

    def begin(self, open_: Open) -> None:
        transfer = open_.submit.transfer
        assert transfer is not None
        self._takes[open_.id] = _Take(open_)
        open_.stages.entered[:] = [(Stage.RESERVE, open_.stages.entered[0][1])]
        self._consumer.expect(open_.id, transfer, self._num_blocks(open_))

    def output(self, _open: Open, _sample: Sample, _output: CoreOutput) -> bool:
        return False

    def abort(self, request_id: RequestId) -> None:
        """Of a request that has been dropped from the book."""
        take = self._takes.pop(request_id, None)
        if take is not None:
            self._drop(take)
            self._consumer.abort(request_id)

    def cut(self, open_: Open) -> None:
        """The router found the end of its last sample."""
        self.abort(open_.id)

    def poll(self) -> None:
        news = self._consumer.poll()
        for request_id in news.started:
            take = self._takes.get(request_id)
            if take is not None and take.state is ConsumerState.QUEUED:
                self._queue(take)
        for request_id in news.freed:
            if (take := self._quarantined.pop(request_id, None)) is not None:
                self._book.core.received(take.sequence_id)
            elif request_id in self._takes:
                self._freed.add(request_id)
        for arrival in news.arrived:
            self._arrive(arrival)

    def make_room(self) -> None:
        """What it holds, it will use."""

    @property
    def num_waiting(self) -> int:
        return sum(take.state is ConsumerState.QUEUED for take in self._takes.values())

    @property
    def num_transferring(self) -> int:
        return sum(take.state is ConsumerState.RESERVED for take in self._takes.values())

    @property
    def num_blocked(self) -> int:
        """Sequences in the core that cannot go on by themselves."""
        return self.num_transferring

    @property
    def holds_blocks(self) -> bool:
        return bool(self._quarantined)

    def counts(self) -> tuple[int, int, int]:
        """Blocks that are reserved for a peer's KV, held for a peer, and in quarantine."""
        reserved = sum(take.num_reserved for take in self._takes.values())
        return reserved, 0, sum(take.num_reserved for take in self._quarantined.values())

    def _num_blocks(self, open_: Open) -> int:
        return -(-len(open_.common) // self._book.core.block_size)

    def _queue(self, take: _Take) -> None:
        """Behind the token that the peer brings. The sequence is no sample's yet: each of them may end before it arrives."""
        sample = next(iter(take.open.samples.values()))
        request = take.open.sequence(sample, ahead=1)
        try:
            self._book.core.add(request)
        except RequestError as error:
            self._book.fail(take.open, error)
            self.abort(take.open.id)
            return
        take.advance(ConsumerState.STARTING)
        take.sequence_id = request.id
        self._by_sequence[request.id] = take
        self._book.sequences[request.id] = (take.open, sample)

    def _arrive(self, arrival: Arrival) -> None:
        request_id = arrival.request_id
        take = self._takes.pop(request_id, None)
        if take is None:
            if not arrival.error and (left := self._quarantined.pop(request_id, None)) is not None:
                self._book.core.received(left.sequence_id)  # the last byte crossed the abort: `freed` will not be told
            return
        if arrival.error:
            transfer = take.open.submit.transfer
            assert transfer is not None
            log.warning(
                "hand-over failed", request=request_id, transfer=transfer.transfer_id, reason=arrival.error,
                trace=transfer.trace_id,
            )  # fmt: skip
            self._drop(take)
            reason = f"the hand-over from the prefill worker failed: {arrival.error}"
            self._book.fail(take.open, HandOverError(reason, by_producer=arrival.by_producer))
            return
        self._by_sequence.pop(take.sequence_id, None)
        self._go_on(take, {first.sample: first for first in arrival.first_tokens})

    def _go_on(self, take: _Take, first_tokens: dict[int, FirstToken]) -> None:
        open_, core = take.open, self._book.core
        self._book.sequences.pop(take.sequence_id, None)
        named = [first_tokens[number].token for number in open_.samples if number in first_tokens]
        if len(named) < len(open_.samples) or not all(0 <= token < core.vocab_size for token in named):
            self._end_carrier(take)
            self._book.fail(open_, HandOverError("the prefill worker did not name every sample's first token"))
            return
        open_.stages.enter(Stage.DECODE)
        going = [sample for sample in open_.going if self._tell_first(open_, sample, first_tokens[sample.number])]
        if not going:
            self._end_carrier(take)
            return
        carrier, *others = going
        carrier.sequence_id = take.sequence_id
        self._book.sequences[take.sequence_id] = (open_, carrier)
        core.received(take.sequence_id, carrier.forced[-1])
        for sample in others:
            self._book.run(open_, sample)

    def _tell_first(self, open_: Open, sample: Sample, first: FirstToken) -> bool:
        """Whether the sample goes on behind it."""
        sample.cached_tokens = first.cached_tokens
        sample.forced.append(first.token)
        finish = open_.finish_reason(sample.num_output + 1, first.token, self._book.core)
        logprobs = None if first.logprobs is None else [first.logprobs]
        self._book.tell(open_, sample, [first.token], finish, logprobs, first.prompt_logprobs)
        if finish is not None:
            self._book.end(open_, sample)
        return finish is None

    def _end_carrier(self, take: _Take) -> None:
        """Its KV is there, and no sample needs it."""
        self._book.core.abort([take.sequence_id])
        self._book.core.received(take.sequence_id)

    def _drop(self, take: _Take) -> None:
        request_id = take.open.id
        self._by_sequence.pop(take.sequence_id, None)
        if take.state is not ConsumerState.QUEUED:
            self._book.sequences.pop(take.sequence_id, None)
            self._book.core.abort([take.sequence_id])
        if take.state is ConsumerState.RESERVED:
            if request_id in self._freed:
                self._book.core.received(take.sequence_id)
            else:
                self._quarantined[request_id] = take
        self._freed.discard(request_id)

    # What the core asks and tells

    def wanted(self, sequence_id: str, num_cached: int) -> int:
        take = self._by_sequence.get(sequence_id)
        return 0 if take is None or take.state is not ConsumerState.STARTING else len(take.open.common) - num_cached

    def allocated(self, sequence_id: str, blocks: Sequence[int], num_cached: int, fence: Fence) -> None:
        take = self._by_sequence[sequence_id]
        first, last = num_cached // self._book.core.block_size, self._num_blocks(take.open)
        take.advance(ConsumerState.RESERVED)
        take.num_reserved = last - first
        take.open.stages.enter(Stage.TRANSFER)
        self._consumer.reserve(take.open.id, list(blocks[first:last]), first, fence)
