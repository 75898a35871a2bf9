"""The embedding relay as a worker sees it: an `EmbeddingProducer` or `EmbeddingConsumer`, each around one transfer thread.

Encode worker:

    expect(transfer_id, consumers) -> offer(transfer_id, embedding) -> poll: sent, or the error

    `offer` copies the embedding into the pool in the caller's thread and says whether there was room; if not, it is to be
    repeated after the next `poll`: there is news when others have given up room, also those of which nothing more is told. An
    embedding that no empty pool could hold raises EmbeddingTooLargeError. On a card the copy is behind what the caller's stream
    was given before; consumers are told when it has passed.

Prefill or whole worker:

    expect(transfer_id, producer, address) -> poll: arrivals, each with further tokens -> ... -> one that is complete -> release

    Every expected transfer ends in exactly one arrival that is complete or has an error, unless it is aborted first. A complete
    one may have tokens in the pool, where they stay until `release` (harmless otherwise). What the caller's stream was given
    before `release` may still read them.

No call blocks. The calls only leave a note for the thread. Should it fail, everything that is open ends with an error, and then
`poll` raises ThreadFailedError: the worker had better be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.errors import EmbeddingTooLargeError
from kvrelay.ids import TransferId, WorkerId, as_transfer_id, as_worker_id
from kvrelay.transfer.embedding.arrival import EmbeddingArrival
from kvrelay.transfer.embedding.kind import EMBEDDINGS, EmbeddingSent
from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.pieces import Embedding
from kvrelay.transfer.embedding.pool import EmbeddingPool, PoolCounts
from kvrelay.transfer.embedding.receiving import EmbeddingReceiving
from kvrelay.transfer.embedding.room import EmbeddingSettings, Rooms
from kvrelay.transfer.embedding.sending import EmbeddingSending
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.relay.consumer import ConsumerMachine
from kvrelay.transfer.relay.desk import RelayCounts
from kvrelay.transfer.relay.fenced import Fenced
from kvrelay.transfer.relay.kind import FAILED
from kvrelay.transfer.relay.link import ProducerLink
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.transfer.relay.producer import ProducerMachine
from kvrelay.transfer.relay.thread import clock
from kvrelay.transfer.relay.turns import ConsumerTurns, Front, ProducerTurns

SendingMachine = ProducerMachine[EmbeddingSending, EmbeddingLayout, list[EmbeddingSent]]
ReceivingMachine = ConsumerMachine[EmbeddingReceiving, EmbeddingLayout, list[EmbeddingArrival]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingParts:
    """What both halves are made of. `host` is equal on two workers that can share memory (`engines.shm.host_identity`)."""

    worker_id: WorkerId
    pool: EmbeddingPool
    engines: Sequence[TransferEngine]
    fingerprint: str
    host: str
    settings: EmbeddingSettings = EmbeddingSettings()
    fence: Callable[[], Fence] = lambda: PASSED  # behind what the caller's stream was given
    on_news: Callable[[], None] = lambda: None  # called in the transfer thread when `poll` has something

    def for_relay(self) -> RelayParts[EmbeddingLayout]:
        return RelayParts(
            worker_id=self.worker_id,
            layout=self.pool.layout,
            region=self.pool.host.region,
            elsewhere=self.pool.regions_on_card(),
            engines=self.engines,
            fingerprint=f"embedding:{self.fingerprint}",
            host=self.host,
            settings=self.settings.transfer,
            on_news=self.on_news,
        )


def expect_sending(
    machine: SendingMachine, pool: EmbeddingPool, transfer_id: TransferId, consumers: Sequence[WorkerId], now: float
) -> None:
    """An embedding will be offered; these will ask for it."""
    end = machine.ended_before(transfer_id, consumers[0])
    if end is None:
        machine.add(EmbeddingSending(transfer_id, consumers, pool, machine.desk), now)
    else:
        reason = end.reason or "its transfer id was used before"
        machine.desk.news.append(EmbeddingSent(transfer_id, reason, end.state == FAILED and not end.peers))


def offer(
    machine: SendingMachine,
    pool: EmbeddingPool,
    transfer_id: TransferId,
    blocks: tuple[int, ...],
    total_tokens: int,
    now: float,
) -> None:
    """The embedding is in these blocks of the pool, which are the relay's from now on."""
    if not machine.tell(transfer_id, lambda sending: sending.offer(blocks, total_tokens, now)):
        pool.give_back(blocks)


def expect_receiving(
    machine: ReceivingMachine,
    rooms: Rooms,
    transfer_id: TransferId,
    producer: WorkerId,
    address: str,
    num: int,
    now: float,
    request_id: str = "",
    trace_id: str = "",
) -> None:
    """An embedding comes from there. `num` consumers get it, this one included."""

    def make(link: ProducerLink[EmbeddingLayout]) -> EmbeddingReceiving:
        return EmbeddingReceiving(transfer_id, link, rooms, machine.desk, num, now, request_id, trace_id)

    if reason := machine.expect(transfer_id, producer, address, make, now):
        machine.desk.news.append(EmbeddingArrival(transfer_id=transfer_id, error=reason))


class EmbeddingProducer(Front[ProducerTurns[EmbeddingLayout, list[EmbeddingSent]]]):
    """Hands the embeddings of an encode worker on. See the module. One thread makes every call."""

    def __init__(self, parts: EmbeddingParts, *, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        """Raises TransferError if a transport cannot register the region, ZMQError if the address cannot be bound."""
        self._pool = parts.pool
        self._fence = parts.fence
        self._fenced = Fenced()
        self._open: set[TransferId] = set()
        self._has_room = False  # that an offer lacked
        self._on_news = parts.on_news
        self._pool.on_room = self._room_came
        listen = (listen_host, listen_port)
        super().__init__(ProducerTurns(EMBEDDINGS, parts.for_relay(), list[EmbeddingSent], listen, self._fenced.look))
        self.signal_address = self._turns.socket.address

    def expect(self, transfer_id: TransferId, consumers: Sequence[WorkerId]) -> None:
        """Raises WrongIdError."""
        as_transfer_id(transfer_id)
        named = [as_worker_id(consumer) for consumer in consumers]
        self._open.add(transfer_id)
        self._turns.call(lambda: expect_sending(self._turns.machine, self._pool, transfer_id, named, clock()))

    def offer(self, transfer_id: TransferId, embedding: Embedding) -> bool:
        """Whether there was room for it. Raises EmbeddingTooLargeError."""
        layout, total_tokens = self._pool.layout, embedding.num_tokens
        if not 1 <= total_tokens <= layout.num_tokens:
            raise EmbeddingTooLargeError(f"an embedding of {total_tokens} tokens, in a pool of {layout.num_tokens}")
        if len(embedding.aux) >= layout.aux_items:
            raise EmbeddingTooLargeError(f"{len(embedding.aux)} aux data, where there is room for {layout.aux_items - 1}")
        blocks = self._pool.take(total_tokens)
        if blocks is None:
            return False
        try:
            self._pool.store(blocks, embedding)
        except BaseException:  # nothing was offered
            self._pool.give_back(blocks)
            raise
        if self._turns.ended:
            self._pool.give_back(blocks)
        fence = self._fence()
        self._turns.call(lambda: self._fenced.put(fence, lambda: self._offered(transfer_id, blocks, total_tokens)))
        return True

    def _offered(self, transfer_id: TransferId, blocks: tuple[int, ...], total_tokens: int) -> None:
        offer(self._turns.machine, self._pool, transfer_id, blocks, total_tokens, clock())

    def abort(self, transfer_id: TransferId) -> None:
        self._open.discard(transfer_id)
        self._turns.call(lambda: self._turns.machine.tell(transfer_id, EmbeddingSending.abort))

    @property
    def has_news(self) -> bool:
        return self._has_room or super().has_news

    def _room_came(self) -> None:
        self._has_room = True
        self._on_news()

    def poll(self) -> list[EmbeddingSent]:
        self._has_room = False
        ended = self._turns.ended  # read first: what the thread said before its end must not be missed
        told = [sent for news in self._turns.take_news() for sent in news if sent.transfer_id in self._open]
        self._open.difference_update(sent.transfer_id for sent in told)
        if ended:
            told += [EmbeddingSent(transfer_id, ended) for transfer_id in self._open]
            self._open.clear()
        if not told:
            self._turns.raise_failure()
        return told

    def counts(self) -> RelayCounts:
        return self._turns.machine.counts

    def pool_counts(self) -> PoolCounts:
        return self._pool.counts()


class EmbeddingConsumer(Front[ConsumerTurns[EmbeddingLayout, list[EmbeddingArrival]]]):
    """Takes embeddings over for a worker that computes prompts. See the module. One thread makes every call."""

    def __init__(self, parts: EmbeddingParts) -> None:
        """Raises TransferError if a transport cannot register the region."""
        self._pool = parts.pool
        self._rooms = Rooms(parts.pool, parts.settings)
        self._open: set[TransferId] = set()
        self._kept: dict[TransferId, tuple[int, ...]] = {}  # complete, and not released
        self._fence = parts.fence
        self._fenced = Fenced()
        super().__init__(ConsumerTurns(EMBEDDINGS, parts.for_relay(), list[EmbeddingArrival], self._fenced.look))

    def expect(
        self,
        transfer_id: TransferId,
        producer: WorkerId,
        signal_address: str,
        required_dst_info_num: int = 1,
        request_id: str = "",
        trace_id: str = "",
    ) -> None:
        """`request_id` and `trace_id` are for log lines. Raises WrongIdError."""
        as_transfer_id(transfer_id)
        as_worker_id(producer)
        self._open.add(transfer_id)
        machine, rooms, num = self._turns.machine, self._rooms, required_dst_info_num
        self._turns.call(
            lambda: expect_receiving(machine, rooms, transfer_id, producer, signal_address, num, clock(), request_id, trace_id)
        )

    def refuse(self, transfer_id: TransferId, producer: WorkerId, signal_address: str) -> None:
        """Instead of `expect`: the embedding is not needed, and its producer should not wait for us. Nothing of it moves: there
        is no turn of the thread between the two, in which it could be asked for."""
        machine, rooms = self._turns.machine, self._rooms

        def expect_and_abort() -> None:
            expect_receiving(machine, rooms, transfer_id, producer, signal_address, 1, clock())
            machine.tell(transfer_id, EmbeddingReceiving.abort)

        self._turns.call(expect_and_abort)

    def release(self, transfer_id: TransferId) -> None:
        """What a complete arrival has in the pool is needed by nothing that the caller does from now on."""
        self._give_back(self._kept.pop(transfer_id, ()))

    def abort(self, transfer_id: TransferId) -> None:
        """At any time, also instead of `release`. Nothing more is told of it."""
        self._open.discard(transfer_id)
        self.release(transfer_id)
        self._turns.call(lambda: self._turns.machine.tell(transfer_id, EmbeddingReceiving.abort))

    def _give_back(self, blocks: tuple[int, ...]) -> None:
        """When the caller's stream is done with them."""
        if not blocks:
            return
        fence = self._fence()
        if fence.passed():
            self._pool.give_back(blocks)
            self._turns.call(lambda: None)  # a turn, for those that wait for room
        else:
            self._turns.call(lambda: self._fenced.put(fence, lambda: self._pool.give_back(blocks)))

    def poll(self) -> list[EmbeddingArrival]:
        ended = self._turns.ended  # read first: what the thread said before its end must not be missed
        wanted: list[EmbeddingArrival] = []
        for arrival in (arrival for news in self._turns.take_news() for arrival in news):
            if arrival.transfer_id not in self._open:  # an abort crossed it
                self._give_back(arrival.blocks)
                continue
            wanted.append(arrival)
            if arrival.is_complete:
                self._kept[arrival.transfer_id] = arrival.blocks
            if arrival.is_complete or arrival.error:
                self._open.discard(arrival.transfer_id)
        if ended:
            wanted += [EmbeddingArrival(transfer_id=transfer_id, error=ended) for transfer_id in self._open]
            self._open.clear()
        if not wanted:
            self._turns.raise_failure()
        return wanted

    def counts(self) -> RelayCounts:
        return self._turns.machine.counts

    def pool_counts(self) -> PoolCounts:
        return self._pool.counts()

    def state_of(self, transfer_id: TransferId) -> object:
        """None: it is not known to the thread, or not any more."""
        return self._turns.machine.table.state_of(transfer_id)
