"""The embedding relay as a worker sees it: an `EmbeddingProducer` or `EmbeddingConsumer`, each around one transfer thread.

Encode worker:

    expect(transfer_id, consumers) -> offer(transfer_id, embedding) -> poll: sent, or the error

    `offer` copies the embedding into the pool (or has it written there) in the caller's thread and says whether there was room;
    if not, it is to be repeated after a later `poll`: others must be taken first. An embedding that no empty pool could hold
    raises EmbeddingTooLargeError.

Prefill or whole worker:

    expect(transfer_id, producer, address) -> poll: arrivals, each with further tokens -> ... -> one that is complete -> release

    Every expected transfer ends in exactly one arrival that is complete or has an error, unless it is aborted first. A complete
    one may have tokens in the pool, where they stay until `release` (harmless otherwise).

No call blocks. The calls only leave a note for the thread. Should it fail, everything that is open ends with an error, and then
`poll` raises ThreadFailedError: the worker had better be replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from kvrelay.errors import KVRelayError, ProtocolError
from kvrelay.ids import TransferId, WorkerId, as_transfer_id, as_worker_id
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding_arrival import EmbeddingArrival
from kvrelay.transfer.embedding_book import RelayCounts
from kvrelay.transfer.embedding_consumer import EmbeddingConsumerMachine
from kvrelay.transfer.embedding_pool import Embedding, EmbeddingPool, PoolCounts
from kvrelay.transfer.embedding_producer import EmbeddingProducerMachine, EmbeddingSent
from kvrelay.transfer.embedding_room import EmbeddingSettings
from kvrelay.transfer.embedding_session import LocalPool
from kvrelay.transfer.engines.base import TransferEngine, TransferError
from kvrelay.transfer.loop import Loop, clock
from kvrelay.transfer.region import Region
from kvrelay.transfer.signal import ConsumerSockets, ProducerSocket
from kvrelay.wire.codec import encode
from kvrelay.wire.embedding import decode_for_consumer, decode_for_producer

_PROBE_S = 0.02  # between looks at a connection attempt


class EmbeddingTooLargeError(KVRelayError):
    """An embedding, or its aux data, that does not even fit an empty pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingParts:
    """What both halves are made of. `host` is equal on two workers that can share memory (`engines.shm.host_identity`)."""

    worker_id: WorkerId
    pool: EmbeddingPool
    region: Region  # the pool's
    engines: Sequence[TransferEngine]
    fingerprint: str
    host: str
    settings: EmbeddingSettings = EmbeddingSettings()
    on_news: Callable[[], None] | None = None  # called in the transfer thread when `poll` has something

    def register(self) -> LocalPool:
        """Raises TransferError, with every engine closed."""
        try:
            for engine in self.engines:
                engine.register(self.region)
        except TransferError:
            self.close_engines()
            raise
        named = {engine.name: engine for engine in self.engines}
        return LocalPool(self.worker_id, self.pool, self.host, f"embedding:{self.fingerprint}", named)

    def close_engines(self) -> None:
        for engine in self.engines:
            engine.close()

    def tell(self) -> None:
        if self.on_news is not None:
            self.on_news()


class _ProducerTurns:
    """The producer's half of the thread."""

    def __init__(self, parts: EmbeddingParts, listen_host: str, listen_port: int) -> None:
        self._parts = parts
        self._listen = (listen_host, listen_port)
        self._tick_at = 0.0
        self.loop: Loop  # set by the owner before the thread starts
        self.lock = threading.Lock()
        self.news: list[EmbeddingSent] = []

    def begin(self, poller: zmq.Poller) -> None:
        self.socket = ProducerSocket(*self._listen)
        try:
            self.machine = EmbeddingProducerMachine(self._parts.register(), self._parts.settings.transfer)
        except BaseException:
            self.socket.close()
            raise
        self.socket.register(poller)

    def turn(self) -> float:
        self.loop.run_commands()
        now = clock()
        for peer, frame in self.socket.receive():
            try:
                self.machine.on_message(peer, decode_for_producer(frame), now)
            except ProtocolError as error:
                self.machine.on_malformed(peer, error)
        self._poll_engines()
        if now >= self._tick_at:
            self._tick_at = now + min(1.0, self._parts.settings.transfer.lease_s / 10)
            self.machine.tick(now)
        self.machine.pump()
        self._send()
        self._publish()
        return self._tick_at - now

    def _poll_engines(self) -> None:
        for engine in self._parts.engines:
            for completion in engine.poll():
                self.machine.on_completion(engine, completion)

    def _send(self) -> None:
        for peer, message in self.machine.take_outgoing():
            self.socket.send(peer, encode(message))

    def _publish(self) -> None:
        if news := self.machine.take_news():
            with self.lock:
                self.news += news
            self._parts.tell()

    @property
    def moving(self) -> bool:
        return self.machine.counts.num_moves > 0

    def finish(self, reason: str) -> None:
        try:
            self.machine.close(reason)
        finally:
            # A socket that is closed tells consumers that nothing of this worker can write their memory any more. So it
            # stays open if a transport does not close.
            self._parts.close_engines()
            try:
                self._poll_engines()
                self._send()
                self._publish()
            finally:
                self.socket.close()


class EmbeddingProducer:
    """Hands the embeddings of an encode worker on. See the module. One thread makes every call."""

    def __init__(self, parts: EmbeddingParts, *, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        """Raises TransferError if a transport cannot register the region, ZMQError if the address cannot be bound."""
        self._pool = parts.pool
        self._turns = _ProducerTurns(parts, listen_host, listen_port)
        self._loop = Loop(f"embedding-{parts.worker_id}", self._turns, on_end=parts.tell)
        self._turns.loop = self._loop
        self._open: set[TransferId] = set()
        self._loop.start()
        self.signal_address = self._turns.socket.address

    def expect(self, transfer_id: TransferId, consumers: Sequence[WorkerId]) -> None:
        """Raises WrongIdError."""
        as_transfer_id(transfer_id)
        named = [as_worker_id(consumer) for consumer in consumers]
        self._open.add(transfer_id)
        self._loop.call(lambda: self._turns.machine.expect(transfer_id, named, clock()))

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
        except BaseException:  # a writer that fails has not offered anything
            self._pool.give_back(blocks)
            raise
        if self._loop.ended:
            self._pool.give_back(blocks)
        self._loop.call(lambda: self._turns.machine.offer(transfer_id, blocks, total_tokens, clock()))
        return True

    def abort(self, transfer_id: TransferId) -> None:
        self._open.discard(transfer_id)
        self._loop.call(lambda: self._turns.machine.abort(transfer_id))

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._loop.call(lambda: self._turns.machine.peer_lost(worker_id, "a router takes it for gone"))

    @property
    def has_news(self) -> bool:
        return bool(self._turns.news or self._loop.has_ended) or bool(self._loop.ended and self._open)

    def poll(self) -> list[EmbeddingSent]:
        ended = self._loop.ended  # read first: what the thread said before its end must not be missed
        with self._turns.lock:
            news, self._turns.news = self._turns.news, []
        news = [sent for sent in news if sent.transfer_id in self._open]
        self._open.difference_update(sent.transfer_id for sent in news)
        if ended:
            news += [EmbeddingSent(transfer_id, ended) for transfer_id in self._open]
            self._open.clear()
        if not news:
            self._loop.raise_failure()
        return news

    def counts(self) -> RelayCounts:
        return self._turns.machine.counts

    def pool_counts(self) -> PoolCounts:
        return self._pool.counts()

    @property
    def num_live(self) -> int:
        return self._turns.machine.num_live

    def state_of(self, transfer_id: TransferId) -> EmbeddingState | None:
        """None: it is not known to the thread, or not any more."""
        return self._turns.machine.state_of(transfer_id)

    def close(self) -> None:
        self._loop.close()


class _ConsumerTurns:
    """The consumer's half of the thread."""

    def __init__(self, parts: EmbeddingParts) -> None:
        self._parts = parts
        self.loop: Loop  # set by the owner before the thread starts
        self.lock = threading.Lock()
        self.news: list[EmbeddingArrival] = []

    def begin(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self.machine = EmbeddingConsumerMachine(self._parts.register(), self._parts.settings)
        self.sockets = ConsumerSockets(self._parts.worker_id)

    def turn(self) -> float:
        self.loop.run_commands()
        self._connect()
        now = clock()
        for peer, frame in self.sockets.receive():
            try:
                self.machine.on_message(peer, decode_for_consumer(frame), now)
            except ProtocolError as error:
                self.machine.on_malformed(peer, error)
        for peer in self.sockets.find_dead():
            self.machine.peer_died(peer, "nobody listens at its address any more")
        self._poll_engines()
        now = clock()  # after the copies: leases are judged by it
        self.machine.tick(now)
        self.machine.pump(now)
        self._send()
        self._publish()
        within_s = self.machine.next_tick(now)
        return min(within_s, _PROBE_S) if self.sockets.probing else within_s

    def _connect(self) -> None:
        producers = self.machine.producers()
        self.sockets.disconnect_all_but(producers, self._poller)
        for peer in producers:
            reason = self.sockets.connect(peer, self.machine.address_of(peer), self._poller)
            if reason:
                self.machine.peer_died(peer, reason)

    def _poll_engines(self) -> None:
        for engine in self._parts.engines:
            for completion in engine.poll():
                self.machine.on_completion(engine, completion)

    def _send(self) -> None:
        for peer, message in self.machine.take_outgoing():
            self.sockets.send(peer, encode(message))

    def _publish(self) -> None:
        if news := self.machine.take_news():
            with self.lock:
                self.news += news
            self._parts.tell()

    @property
    def moving(self) -> bool:
        return self.machine.counts.num_moves > 0

    def finish(self, reason: str) -> None:
        try:
            self.machine.close(reason)
            self._send()
        finally:
            try:
                self._parts.close_engines()
                self._poll_engines()
                self.machine.close(reason, is_unreachable=True)
                self._send()
                self._publish()
            finally:
                self.sockets.close(self._poller)


class EmbeddingConsumer:
    """Takes embeddings over for whoever computes prompts. See the module. One thread makes every call."""

    def __init__(self, parts: EmbeddingParts) -> None:
        """Raises TransferError if a transport cannot register the region."""
        self._pool = parts.pool
        self._turns = _ConsumerTurns(parts)
        self._loop = Loop(f"embedding-{parts.worker_id}", self._turns, on_end=parts.tell)
        self._turns.loop = self._loop
        self._open: set[TransferId] = set()
        self._kept: dict[TransferId, tuple[int, ...]] = {}  # complete, and not released
        self._loop.start()

    def expect(self, transfer_id: TransferId, producer: WorkerId, signal_address: str, required_dst_info_num: int = 1) -> None:
        """Raises WrongIdError."""
        as_transfer_id(transfer_id)
        as_worker_id(producer)
        self._open.add(transfer_id)
        self._loop.call(
            lambda: self._turns.machine.expect(transfer_id, producer, signal_address, required_dst_info_num, clock())
        )

    def refuse(self, transfer_id: TransferId, producer: WorkerId, signal_address: str) -> None:
        """Instead of `expect`: the embedding is not needed, and its producer should not wait for us. Nothing of it moves."""
        as_transfer_id(transfer_id)
        as_worker_id(producer)

        def expect_and_abort() -> None:
            self._turns.machine.expect(transfer_id, producer, signal_address, 1, clock())
            self._turns.machine.abort(transfer_id)

        self._loop.call(expect_and_abort)

    def release(self, transfer_id: TransferId) -> None:
        """What a complete arrival has in the pool is not needed any more."""
        self._give_back(self._kept.pop(transfer_id, ()))

    def abort(self, transfer_id: TransferId) -> None:
        """At any time, also instead of `release`. Nothing more is told of it."""
        self._open.discard(transfer_id)
        self.release(transfer_id)
        self._loop.call(lambda: self._turns.machine.abort(transfer_id))

    def _give_back(self, blocks: tuple[int, ...]) -> None:
        if blocks:
            self._pool.give_back(blocks)
            self._loop.call(lambda: None)  # a turn, for whoever waits for room

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._loop.call(lambda: self._turns.machine.peer_lost(worker_id, "a router takes it for gone"))

    @property
    def has_news(self) -> bool:
        return bool(self._turns.news or self._loop.has_ended) or bool(self._loop.ended and self._open)

    def poll(self) -> list[EmbeddingArrival]:
        ended = self._loop.ended  # read first: what the thread said before its end must not be missed
        with self._turns.lock:
            arrivals, self._turns.news = self._turns.news, []
        for arrival in arrivals:
            if arrival.transfer_id not in self._open:  # an abort crossed it
                self._give_back(arrival.blocks)
        wanted = [arrival for arrival in arrivals if arrival.transfer_id in self._open]
        for arrival in wanted:
            if arrival.is_complete:
                self._kept[arrival.transfer_id] = arrival.blocks
            if arrival.is_complete or arrival.error:
                self._open.discard(arrival.transfer_id)
        if ended:
            wanted += [EmbeddingArrival(transfer_id=transfer_id, error=ended) for transfer_id in self._open]
            self._open.clear()
        if not wanted:
            self._loop.raise_failure()
        return wanted

    def counts(self) -> RelayCounts:
        return self._turns.machine.counts

    def pool_counts(self) -> PoolCounts:
        return self._pool.counts()

    @property
    def num_live(self) -> int:
        return self._turns.machine.num_live

    def state_of(self, transfer_id: TransferId) -> EmbeddingState | None:
        """None: it is not known to the thread, or not any more."""
        return self._turns.machine.state_of(transfer_id)

    def close(self) -> None:
        self._loop.close()
