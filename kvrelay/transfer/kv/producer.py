"""The relay's producing half as an engine sees it: `engine.movers.Producer` around a transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.movers import ProducerNews
from kvrelay.ids import RequestId
from kvrelay.states import ProducerState
from kvrelay.transfer.kv.counts import mapping_counts, transfer_counts
from kvrelay.transfer.kv.kind import KV
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.kv.plan import TransferMeta, transfer_meta
from kvrelay.transfer.kv.sending import Sending
from kvrelay.transfer.relay.kind import FAILED
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.transfer.relay.producer import ProducerMachine
from kvrelay.transfer.relay.thread import clock
from kvrelay.transfer.relay.turns import Front, ProducerTurns
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import FirstToken, TransferInfo

# How often the thread looks for finished layers while a pass computes something that is being sent. Waking it with every layer
# would hand it the interpreter just when the model needs it; so it mostly runs while the model is inside a kernel.
_LAYER_S = 0.001

SendingMachine = ProducerMachine[Sending, KVLayout, ProducerNews]


class Steps:
    """The forward pass under way, as far as it computes what is handed over. For the transfer thread, but for `progress`."""

    def __init__(self) -> None:
        self.progress = (0, 0)  # step, layers of it that are done: written by the engine's thread alone
        self._seen = (0, 0)
        self._step = 0  # of the engine, as far as this thread has heard
        self._rows: list[tuple[Sending, int]] = []

    def begin(self, step: int, rows: list[tuple[Sending, int]]) -> None:
        self._step, self._rows = step, rows

    def end(self) -> None:
        for sending, tokens in self._rows:
            sending.computed(tokens)
        self._rows = []

    def look(self) -> float:
        """The pause until the next look is short while a layer of the pass could be moved as soon as it is computed."""
        step, layers = progress = self.progress
        if progress != self._seen and step <= self._step:
            self._seen = progress
            if step == self._step:
                for sending, tokens in self._rows:
                    sending.computing(tokens, layers)
        return _LAYER_S if any(sending.state is ProducerState.SENDING for sending, _ in self._rows) else 1.0


def expect(machine: SendingMachine, meta: TransferMeta, now: float) -> None:
    end = machine.ended_before(meta.transfer_id, meta.peer)
    if end is None:
        machine.add(Sending(meta, machine.desk), now)
        return
    machine.desk.news.released.append(meta.request_id)  # the consumer gave up before this worker had heard of it
    if end.state == FAILED:
        machine.desk.news.failed.append((meta.request_id, end.reason))


class RelayProducer(Front[ProducerTurns[KVLayout, ProducerNews]]):
    """Hands the KV of a prefill worker on; implements `engine.movers.Producer`."""

    def __init__(self, parts: RelayParts[KVLayout], *, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        """Raises TransferError if a transport cannot register the region, ZMQError if the address cannot be bound."""
        self._steps = Steps()
        self._open: set[RequestId] = set()
        self._lent: set[RequestId] = set()  # of these, those whose blocks the relay has
        self._aborted: set[RequestId] = set()  # of these, those whose blocks the engine waits for
        self._step = 0
        super().__init__(ProducerTurns(KV, parts, ProducerNews, (listen_host, listen_port), self._steps.look))
        self.signal_address = self._turns.socket.address

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        """Raises WrongIdError."""
        meta = transfer_meta(request_id, transfer, transfer.consumer, num_tokens)
        self._open.add(request_id)
        self._turns.call(lambda: expect(self._turns.machine, meta, clock()))

    def start(self, request_id: RequestId, blocks: Sequence[int], num_computed: int) -> None:
        given = tuple(blocks)
        if request_id in self._open:
            self._lent.add(request_id)
        self._tell(request_id, lambda sending: sending.start(given, num_computed, clock()))

    def begin_step(self, rows: Sequence[tuple[RequestId, int]]) -> None:
        self._step += 1
        step, listed = self._step, list(rows)

        def begin() -> None:
            found = ((self._turns.machine.table.named(request_id), tokens) for request_id, tokens in listed)
            self._steps.begin(step, [(sending, tokens) for sending, tokens in found if sending is not None])

        self._turns.call(begin)

    def layer_done(self, layer: int) -> None:
        self._steps.progress = (self._step, layer + 1)

    def end_step(self) -> None:
        self._turns.call(self._steps.end)

    def finish(self, request_id: RequestId, first_tokens: list[FirstToken]) -> None:
        self._tell(request_id, lambda sending: sending.finish(first_tokens))

    def set_aside(self, request_id: RequestId) -> None:
        self._tell(request_id, Sending.set_aside)

    def abort(self, request_id: RequestId) -> None:
        if request_id in self._lent:
            self._aborted.add(request_id)
        else:
            self._open.discard(request_id)  # nothing will be said of it
        self._tell(request_id, Sending.abort)

    def _tell(self, request_id: RequestId, action: Callable[[Sending], None]) -> None:
        self._turns.call(lambda: self._turns.machine.tell(request_id, action))

    def poll(self) -> ProducerNews:
        ended = self._turns.ended  # read first: what the thread said before its end must not be missed
        news = ProducerNews()
        for each in self._turns.take_news():
            news.released += each.released
            news.set_aside += each.set_aside
            news.restart += each.restart
            news.failed += each.failed
        for request_id in news.set_aside:
            self._lent.discard(request_id)
            if request_id in self._aborted:  # the two crossed: nothing more will be said of it
                self._forget(request_id)
        for request_id in news.released:
            self._forget(request_id)
        if ended and self._open:
            news.released.extend(self._open)
            news.failed.extend((request_id, ended) for request_id in self._open)
            for request_id in list(self._open):
                self._forget(request_id)
        elif not news.released:
            self._turns.raise_failure()
        return news

    def _forget(self, request_id: RequestId) -> None:
        for known in (self._open, self._lent, self._aborted):
            known.discard(request_id)

    def counts(self) -> TransferCounts:
        return transfer_counts(self._turns.machine)

    def mapping(self) -> MappingCounts:
        return mapping_counts(self._turns.machine)
