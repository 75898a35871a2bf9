"""The relay's producing half: `engine.movers.Producer` around a transfer thread. See `mover`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zmq

from kvrelay.engine.movers import ProducerNews
from kvrelay.errors import ProtocolError
from kvrelay.ids import RequestId, WorkerId
from kvrelay.transfer.kv_producer import ProducerMachine
from kvrelay.transfer.loop import Loop, clock
from kvrelay.transfer.relay_parts import RelayParts, RelayStats, check_ids, mapping_counts
from kvrelay.transfer.signal import ProducerSocket
from kvrelay.wire.codec import encode
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import FirstToken, TransferInfo
from kvrelay.wire.transfer import decode_for_producer

# How often the thread looks for finished layers while a pass computes something that is being sent. Waking it with every layer
# would hand it the interpreter just when the model needs it; so it mostly runs while the model is inside a kernel.
_LAYER_S = 0.001


class _ProducerTurns:
    """The producer's half of the thread."""

    def __init__(self, parts: RelayParts, listen_host: str, listen_port: int) -> None:
        self._parts = parts
        self._listen = (listen_host, listen_port)
        self._tick_at = 0.0
        self._seen = (0, 0)
        self.step = 0  # of the engine, as far as this thread has heard
        self.loop: Loop  # set by the owner before the thread starts
        self.progress = (0, 0)  # step, layers of it that are done: written by the engine's thread alone
        self.lock = threading.Lock()
        self.news = ProducerNews()

    def begin(self, poller: zmq.Poller) -> None:
        self.socket = ProducerSocket(*self._listen)
        try:
            self.machine = ProducerMachine(self._parts.register(), self._parts.settings)
        except BaseException:
            self.socket.close()
            raise
        self.socket.register(poller)

    def turn(self) -> float:
        self.loop.run_commands()
        self._look_at_layers()
        now = clock()
        for peer, frame in self.socket.receive():
            try:
                self.machine.on_message(peer, decode_for_producer(frame), now)
            except ProtocolError as error:
                self.machine.on_malformed(peer, error)
        self._poll_engines()
        if now >= self._tick_at:
            self._tick_at = now + min(1.0, self._parts.settings.lease_s / 10)
            self.machine.tick(now)
        self.machine.pump()
        self._send()
        self._publish()
        within_s = self._tick_at - now
        return min(within_s, _LAYER_S) if self.machine.wants_layers() else within_s

    def _look_at_layers(self) -> None:
        step, layers = progress = self.progress
        if progress != self._seen and step <= self.step:
            self._seen = progress
            if step == self.step:
                self.machine.layers_done(layers)

    def _poll_engines(self) -> None:
        for engine in self._parts.engines:
            for completion in engine.poll():
                self.machine.on_completion(engine, completion)

    def _send(self) -> None:
        for peer, message in self.machine.take_outgoing():
            self.socket.send(peer, encode(message))

    def _publish(self) -> None:
        news = self.machine.take_news()
        if not (news.released or news.parked or news.restart or news.failed):
            return
        with self.lock:
            self.news.released += news.released
            self.news.parked += news.parked
            self.news.restart += news.restart
            self.news.failed += news.failed
        self._parts.tell()

    @property
    def moving(self) -> bool:
        return self.machine.num_moves > 0

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


class RelayProducer:
    """Hands the KV of a prefill worker on; implements `engine.movers.Producer`."""

    def __init__(self, parts: RelayParts, *, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        """Raises TransferError if a transport cannot register the region, ZMQError if the address cannot be bound."""
        self._turns = _ProducerTurns(parts, listen_host, listen_port)
        self._loop = Loop(f"transfer-{parts.worker_id}", self._turns, on_end=parts.tell)
        self._turns.loop = self._loop
        self._open: dict[RequestId, bool] = {}  # whether blocks were given
        self._aborted: set[RequestId] = set()  # of these, those whose blocks the engine waits for
        self._step = 0
        self._loop.start()
        self.signal_address = self._turns.socket.address

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        """Raises WrongIdError."""
        check_ids(request_id, transfer)
        self._open[request_id] = False
        self._loop.call(lambda: self._turns.machine.expect(request_id, transfer, num_tokens, clock()))

    def start(self, request_id: RequestId, blocks: Sequence[int], num_computed: int) -> None:
        given = tuple(blocks)
        if request_id in self._open:
            self._open[request_id] = True
        self._loop.call(lambda: self._turns.machine.start(request_id, given, num_computed, clock()))

    def begin_step(self, rows: Sequence[tuple[RequestId, int]]) -> None:
        self._step += 1
        step, listed = self._step, list(rows)

        def begin() -> None:
            self._turns.step = step
            self._turns.machine.begin_step(listed)

        self._loop.call(begin)

    def layer_done(self, layer: int) -> None:
        self._turns.progress = (self._step, layer + 1)

    def end_step(self) -> None:
        self._loop.call(self._turns.machine.end_step)

    def finish(self, request_id: RequestId, first_tokens: list[FirstToken]) -> None:
        self._loop.call(lambda: self._turns.machine.finish(request_id, first_tokens))

    def park(self, request_id: RequestId) -> None:
        self._loop.call(lambda: self._turns.machine.park(request_id))

    def abort(self, request_id: RequestId) -> None:
        if not self._open.get(request_id, True):
            del self._open[request_id]  # nothing will be said of it
        elif request_id in self._open:
            self._aborted.add(request_id)
        self._loop.call(lambda: self._turns.machine.abort(request_id))

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._loop.call(lambda: self._turns.machine.peer_lost(worker_id, "a router takes it for gone"))

    @property
    def has_news(self) -> bool:
        news = self._turns.news
        said = news.released or news.parked or news.restart or news.failed
        return bool(said or self._loop.has_ended) or bool(self._loop.ended and self._open)

    def poll(self) -> ProducerNews:
        ended = self._loop.ended  # read first: what the thread said before its end must not be missed
        with self._turns.lock:
            news, self._turns.news = self._turns.news, ProducerNews()
        for request_id in news.parked:
            self._open[request_id] = False
            if request_id in self._aborted:  # the two crossed: nothing more will be said of it
                self._forget(request_id)
        for request_id in news.released:
            self._forget(request_id)
        if ended and self._open:
            news.released.extend(self._open)
            news.failed.extend((request_id, ended) for request_id in self._open)
            self._open.clear()
            self._aborted.clear()
        elif not news.released:
            self._loop.raise_failure()
        return news

    def _forget(self, request_id: RequestId) -> None:
        self._open.pop(request_id, None)
        self._aborted.discard(request_id)

    def counts(self) -> TransferCounts:
        return self._turns.machine.counts()

    def mapping(self) -> MappingCounts:
        machine = self._turns.machine
        return mapping_counts(machine.table.snapshot(), machine.malformed, machine.num_repeated)

    @property
    def num_links(self) -> int:
        return self._turns.machine.num_links

    def stats(self) -> RelayStats:
        machine, socket = self._turns.machine, self._turns.socket
        return RelayStats(
            table=machine.table.snapshot(),
            counts=machine.counts(),
            malformed=machine.malformed,
            unsent=socket.unsent,
            strangers=socket.strangers,
        )

    @property
    def num_turns(self) -> int:
        """Of the transfer thread, since its start."""
        return self._loop.num_turns

    def close(self) -> None:
        self._loop.close()
