"""Hand-overs that move nothing: both sides of the relay as engines see them, with the time that messages and bytes take.

    producer                                consumer
      start  ---- latency -->                 started: the engine reserves
                                              reserve
      the bytes of what is computed move when both have happened, a chunk while it is computed, all but its last layer
      released  <---- latency ----            arrived

In read mode `started` is said when the prompt is computed, so no byte moves before. Transfers of one worker share its link:
one after the other. A transfer that ends otherwise (an abort, a worker that is gone) is told to both sides as the relay does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.fence import Fence
from kvrelay.engine.movers import Arrival, ConsumerNews, ProducerNews
from kvrelay.ids import RequestId, TransferId, WorkerId
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.embedding import Moves
from kvrelay.simulate.host import Host
from kvrelay.simulate.loop import VirtualLoop
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import FirstToken, TransferInfo


@dataclass(frozen=True, slots=True)
class Chunk:
    """Computed between two moments: the tokens up to `end`."""

    end: int
    began_at: float
    ended_at: float


@dataclass(slots=True, eq=False)
class Transfer:
    info: TransferInfo
    producer: SimulatedProducer | None = None
    consumer: SimulatedConsumer | None = None
    producer_request: RequestId | None = None
    consumer_request: RequestId | None = None
    num_tokens: int = 0
    told_at: float | None = None  # that it has started: then the consumer's side hears it
    holds_blocks: bool = False  # the producer
    reserved_at: float | None = None
    skip_tokens: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    first_tokens: list[FirstToken] | None = None  # of a prompt that is computed
    is_aside: bool = False
    is_over: bool = False


class Network:
    """All transfers of a cluster that have not ended. `host` is one that all workers share, if they do."""

    def __init__(self, loop: VirtualLoop, costs: Costs, host: Host | None = None) -> None:
        self.loop = loop
        self.costs = costs
        self.latency_s = costs.latency_ms / 1000.0
        self._host = host
        self._random = random.Random("hand-overs")
        self.moves = Moves(loop, costs)
        self.transfers: dict[TransferId, Transfer] = {}
        self.num_messages = 0  # on their way

    def get(self, info: TransferInfo) -> Transfer:
        transfer = self.transfers.get(info.transfer_id)
        if transfer is None:
            transfer = self.transfers[info.transfer_id] = Transfer(info)
        return transfer

    def later(self, function: Callable[..., object], *arguments: object, messages: int = 1) -> None:
        self.num_messages += 1
        self.loop.at(self.loop.now + messages * self.latency_s, self._deliver, function, arguments)

    def _deliver(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.num_messages -= 1
        function(*arguments)

    def move(self, transfer: Transfer) -> None:
        """Both sides are ready: says when the last byte will be there."""
        producer, consumer = transfer.producer, transfer.consumer
        assert producer is not None
        assert consumer is not None
        assert transfer.reserved_at is not None
        costs, moved, now = self.costs, transfer.skip_tokens, self.loop.now
        at = max(transfer.reserved_at + self.latency_s, producer.link_free_at, consumer.link_free_at)
        for chunk in transfer.chunks:
            if chunk.end > moved:
                seconds = costs.transfer_s(chunk.end - moved)
                began_at, ended_at = min(now, chunk.began_at), min(now, chunk.ended_at)
                at = max(max(at, began_at) + seconds, ended_at + seconds / costs.num_layers)
                moved = chunk.end
        at = max(at, now)  # a step may have ended earlier or later than it was foretold
        producer.link_free_at = consumer.link_free_at = at
        self.loop.at(at + self._hand_over_s(), self._arrived, transfer)

    def _hand_over_s(self) -> float:
        known = self.costs.hand_over_ms
        if not known.alone:
            return self.latency_s
        is_beside = self._host is not None and self._host.has_steps
        return self._random.choice((known.beside_steps if is_beside else ()) or known.alone) / 1000.0

    def _arrived(self, transfer: Transfer) -> None:
        if transfer.is_over:
            return
        producer, consumer = transfer.producer, transfer.consumer
        assert producer is not None
        assert consumer is not None
        assert transfer.first_tokens is not None
        assert transfer.consumer_request is not None
        assert transfer.producer_request is not None
        consumer.num_done += 1
        producer.num_done += 1
        producer.num_bytes += (transfer.num_tokens - transfer.skip_tokens) * self.costs.kv_bytes_per_token
        self.end(transfer)
        consumer.arrived(Arrival(transfer.consumer_request, transfer.first_tokens))
        self.later(producer.released, transfer.producer_request, "")

    def end(self, transfer: Transfer) -> None:
        """One that only one side knows is remembered for the other."""
        transfer.is_over = True
        if transfer.producer is not None and transfer.consumer is not None:
            self.transfers.pop(transfer.info.transfer_id, None)
        if transfer.producer is not None and transfer.producer_request is not None:
            transfer.producer.transfers.pop(transfer.producer_request, None)
        if transfer.consumer is not None and transfer.consumer_request is not None:
            transfer.consumer.transfers.pop(transfer.consumer_request, None)

    def fail(self, transfer: Transfer, reason: str, *, by_producer: bool = False, by_consumer: bool = False) -> None:
        """Each side is told, but for the one that ended it: of that, what it holds comes back."""
        if transfer.is_over:
            return
        self.end(transfer)
        producer, request_id = transfer.producer, transfer.producer_request
        if producer is not None and request_id is not None and (transfer.holds_blocks or not by_producer):
            self.later(producer.released, request_id, "" if by_producer or by_consumer else reason)
        consumer, request_id = transfer.consumer, transfer.consumer_request
        if consumer is not None and request_id is not None:
            if not by_consumer:
                self.later(consumer.arrived, Arrival(request_id, [], reason, by_producer))
            if transfer.reserved_at is not None:
                self.later(consumer.freed, request_id, messages=2)


class Side:
    """What both sides are to their engines. `wake` says that there is news."""

    num_links = 0

    def __init__(self, network: Network, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._network = network
        self._clock = clock
        self._wake = wake
        self.transfers: dict[RequestId, Transfer] = {}
        self.has_news = False
        self.link_free_at = 0.0
        self.num_done = 0
        self.num_failed = 0
        self.num_bytes = 0

    def _tell(self) -> None:
        self.has_news = True
        self._wake()

    def peer_lost(self, worker_id: WorkerId) -> None:
        for transfer in list(self.transfers.values()):
            if worker_id in (transfer.info.producer, transfer.info.consumer):
                self.num_failed += 1
                self._network.fail(transfer, f"worker {worker_id} is gone")

    def counts(self) -> TransferCounts:
        return TransferCounts(in_flight=len(self.transfers), done=self.num_done, failed=self.num_failed, bytes=self.num_bytes)

    def mapping(self) -> MappingCounts:
        return MappingCounts(size=len(self.transfers))

    def close(self) -> None:
        pass


class SimulatedProducer(Side):
    """`clock` is ahead of the loop's while a step is committed: it says when the step will have ended. `at_end` calls then."""

    def __init__(
        self, network: Network, clock: Callable[[], float], wake: Callable[[], None], at_end: Callable[..., None]
    ) -> None:
        super().__init__(network, clock, wake)
        self._at_end = at_end
        self._news = ProducerNews()
        self._rows: Sequence[tuple[RequestId, int]] = ()
        self._began_at = 0.0

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        known = self._network.get(transfer)
        known.producer, known.producer_request, known.num_tokens = self, request_id, num_tokens
        self.transfers[request_id] = known
        if known.is_over:
            self._network.end(known)
            self._network.later(self.released, request_id, "the decode worker ended it")

    def start(self, request_id: RequestId, blocks: Sequence[int], num_computed: int, fence: Fence) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is None:
            return
        now = self._clock()
        transfer.holds_blocks = True
        transfer.chunks = [Chunk(num_computed, now, now)]
        if transfer.info.mode == "write":
            self._tell_started(transfer)

    def begin_step(self, rows: Sequence[tuple[RequestId, int]]) -> None:
        self._rows, self._began_at = rows, self._clock()

    def layer_done(self, layer: int, fence: Fence) -> None:
        raise AssertionError("no layer is computed")

    def end_step(self) -> None:
        now = self._clock()
        for request_id, end in self._rows:
            if (transfer := self.transfers.get(request_id)) is not None:
                transfer.chunks.append(Chunk(end, self._began_at, now))

    def finish(self, request_id: RequestId, first_tokens: list[FirstToken]) -> None:
        """During the step whose end it is: what follows happens when that is over."""
        transfer = self.transfers.get(request_id)
        if transfer is not None:
            self._at_end(self._finished, transfer, first_tokens)

    def _finished(self, transfer: Transfer, first_tokens: list[FirstToken]) -> None:
        if transfer.is_over:
            return
        transfer.first_tokens = first_tokens
        self._tell_started(transfer)
        if transfer.reserved_at is not None:
            self._network.move(transfer)

    def _tell_started(self, transfer: Transfer) -> None:
        if transfer.told_at is None:
            transfer.told_at = self._network.loop.now + self._network.latency_s
            if transfer.consumer is not None:
                self._network.loop.at(transfer.told_at, transfer.consumer.started, transfer)

    def set_aside(self, request_id: RequestId) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is not None and transfer.reserved_at is None and transfer.first_tokens is not None:
            transfer.is_aside, transfer.holds_blocks, transfer.first_tokens = True, False, None
            self._news.set_aside.append(request_id)
            self._tell()

    def wanted(self, transfer: Transfer) -> None:
        """One that was set aside: the consumer has reserved."""
        if transfer.is_aside and not transfer.is_over and transfer.producer_request is not None:
            transfer.is_aside = False
            self._news.restart.append(transfer.producer_request)
            self._tell()

    def released(self, request_id: RequestId, failure: str) -> None:
        self._news.released.append(request_id)
        if failure:
            self._news.failed.append((request_id, failure))
        self._tell()

    def abort(self, request_id: RequestId) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is not None:
            self._network.fail(transfer, "the prefill worker ended it", by_producer=True)

    def poll(self) -> ProducerNews:
        news, self._news, self.has_news = self._news, ProducerNews(), False
        return news


class SimulatedConsumer(Side):
    """`began` says that there is news, and that it is of prompts that have begun and nothing else."""

    def __init__(
        self, network: Network, clock: Callable[[], float], wake: Callable[[], None], began: Callable[[], None]
    ) -> None:
        super().__init__(network, clock, wake)
        self._began = began
        self._news = ConsumerNews()

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        known = self._network.get(transfer)
        known.consumer, known.consumer_request = self, request_id
        self.transfers[request_id] = known
        if known.is_over:
            self._network.end(known)
            self._network.later(self.arrived, Arrival(request_id, [], "the prefill worker ended it", by_producer=True))
        elif known.told_at is not None:
            if known.told_at <= self._clock():
                self.started(known)  # it was held back
            else:
                self._network.loop.at(known.told_at, self.started, known)

    def started(self, transfer: Transfer) -> None:
        if not transfer.is_over and transfer.consumer_request is not None:
            self._news.started.append(transfer.consumer_request)
            self.has_news = True
            self._began()

    def reserve(self, request_id: RequestId, blocks: Sequence[int], skip_tokens: int, fence: Fence) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is None:  # it crosses the end of its transfer
            self._network.later(self.freed, request_id)
            return
        transfer.reserved_at, transfer.skip_tokens = self._clock(), skip_tokens
        if transfer.producer is not None and transfer.is_aside:
            self._network.later(transfer.producer.wanted, transfer)
        elif transfer.first_tokens is not None:
            self._network.move(transfer)

    def arrived(self, arrival: Arrival) -> None:
        self._news.arrived.append(arrival)
        self._tell()

    def freed(self, request_id: RequestId) -> None:
        self._news.freed.append(request_id)
        self._tell()

    def abort(self, request_id: RequestId) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is not None:
            self._network.fail(transfer, "the decode worker ended it", by_consumer=True)

    def poll(self) -> ConsumerNews:
        news, self._news, self.has_news = self._news, ConsumerNews(), False
        return news
