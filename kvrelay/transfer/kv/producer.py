"""The relay's producing half as an engine sees it: `engine.movers.Producer` around a transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.engine.movers import ProducerNews
from kvrelay.ids import RequestId
from kvrelay.states import ProducerState
from kvrelay.transfer.kv.counts import mapping_counts, transfer_counts
from kvrelay.transfer.kv.kind import KV
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.kv.plan import TransferMeta, transfer_meta
from kvrelay.transfer.kv.sending import Sending
from kvrelay.transfer.relay.fenced import LOOK_S, Fenced
from kvrelay.transfer.relay.kind import FAILED
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.transfer.relay.producer import ProducerMachine
from kvrelay.transfer.relay.thread import clock
from kvrelay.transfer.relay.turns import Front, ProducerTurns
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import FirstToken, TransferInfo

SendingMachine = ProducerMachine[Sending, KVLayout, ProducerNews]

_LAUNCH_LOOK_S = 0.001  # while a pass is launched on a card: every look holds the launch up

Rows = list[tuple[RequestId, tuple[int, ...], int]]
"""What a pass computes: requests, their blocks, and their tokens up to which count."""


class Steps:
    """For the transfer thread: forward passes that compute what is handed over. Several may be under way: what is said of a
    pass holds as far as its fences have passed, and of a later pass not before.

    While a pass computes something that is being sent, the thread looks for finished layers now and then. Waking it with every
    layer would hand it the interpreter just when the model needs it; so it mostly runs while the model is inside a kernel. A
    card's kernels are only launched by then, which needs the interpreter all the time, so it looks less often."""

    def __init__(self, find: Callable[[RequestId], Sending | None], num_layers: int) -> None:
        self._find = find
        self._num_layers = num_layers
        self._fenced = Fenced()
        self._rows: Rows = []  # of the last pass, while it is launched
        self._is_launching = False  # a pass on a card

    def layer_done(self, rows: Rows, layers: int, fence: Fence) -> None:
        self._is_launching = fence is not PASSED and layers < self._num_layers
        self._fenced.put(fence, lambda: self._computing(rows, layers))

    def ended(self, rows: Rows) -> None:
        self._is_launching = False
        self._fenced.put(PASSED, lambda: self._computed(rows))

    def put(self, fence: Fence, action: Callable[[], object]) -> None:
        """Behind what was said before."""
        self._fenced.put(fence, action)

    def begin(self, rows: Rows) -> None:
        self._rows = rows

    def look(self) -> float:
        """The pause until the next look is short while a layer of a pass could be moved as soon as it is computed."""
        pause_s = self._fenced.look()
        if self._is_launching:
            return _LAUNCH_LOOK_S
        is_sent = any(sending.state is ProducerState.SENDING for sending, _, _ in self._found(self._rows))
        return LOOK_S if is_sent else pause_s

    def _computing(self, rows: Rows, layers: int) -> None:
        for sending, blocks, tokens in self._found(rows):
            sending.computing(blocks, tokens, layers)

    def _computed(self, rows: Rows) -> None:
        for sending, blocks, tokens in self._found(rows):
            sending.computed(blocks, tokens)
        if self._rows is rows:
            self._rows = []

    def _found(self, rows: Rows) -> Iterator[tuple[Sending, tuple[int, ...], int]]:
        for request_id, blocks, tokens in rows:
            sending = self._find(request_id)
            if sending is not None:
                yield sending, blocks, tokens


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
        self._num_layers = parts.layout.num_layers
        self._steps = Steps(lambda request_id: self._turns.machine.table.named(request_id), self._num_layers)
        self._open: set[RequestId] = set()
        self._lent: dict[RequestId, tuple[int, ...]] = {}  # of these, those whose blocks the relay has
        self._aborted: set[RequestId] = set()  # of these, those whose blocks the engine waits for
        self._rows: Rows = []  # of the pass that is being launched
        super().__init__(ProducerTurns(KV, parts, ProducerNews, (listen_host, listen_port), self._steps.look))
        self.signal_address = self._turns.socket.address

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        """Raises WrongIdError."""
        meta = transfer_meta(request_id, transfer, transfer.consumer, num_tokens)
        self._open.add(request_id)
        self._turns.call(lambda: expect(self._turns.machine, meta, clock()))

    def start(self, request_id: RequestId, blocks: Sequence[int], num_computed: int, fence: Fence) -> None:
        given = tuple(blocks)
        if request_id in self._open:
            self._lent[request_id] = given
        self._tell(request_id, lambda sending: sending.start(given, 0, clock()))
        if num_computed:
            self._behind(fence, request_id, lambda sending: sending.computed(given, num_computed))

    def begin_step(self, rows: Sequence[tuple[RequestId, int]]) -> None:
        lent = self._lent
        listed = self._rows = [(request_id, lent[request_id], tokens) for request_id, tokens in rows if request_id in lent]
        self._turns.call(lambda: self._steps.begin(listed))

    def layer_done(self, layer: int, fence: Fence) -> None:
        rows = self._rows
        say = self._turns.call if layer + 1 == self._num_layers else self._turns.note
        say(lambda: self._steps.layer_done(rows, layer + 1, fence))

    def end_step(self) -> None:
        """Does not wake the thread: while it sends it looks by itself, and a wake here would only delay `finish`."""
        rows = self._rows
        self._turns.note(lambda: self._steps.ended(rows))

    def finish(self, request_id: RequestId, first_tokens: list[FirstToken]) -> None:
        """Behind the pass that the tokens were sampled from."""
        if (given := self._lent.get(request_id)) is not None:
            self._behind(PASSED, request_id, lambda sending: sending.finish(given, first_tokens))

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

    def _behind(self, fence: Fence, request_id: RequestId, action: Callable[[Sending], None]) -> None:
        self._turns.call(lambda: self._steps.put(fence, lambda: self._turns.machine.tell(request_id, action)))

    def poll(self) -> ProducerNews:
        ended = self._turns.ended  # read first: what the thread said before its end must not be missed
        news = ProducerNews()
        for each in self._turns.take_news():
            news.released += each.released
            news.set_aside += each.set_aside
            news.restart += each.restart
            news.failed += each.failed
            news.sent_bytes |= each.sent_bytes
        for request_id in news.set_aside:
            self._lent.pop(request_id, None)
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
        self._lent.pop(request_id, None)
        self._open.discard(request_id)
        self._aborted.discard(request_id)

    def counts(self) -> TransferCounts:
        return transfer_counts(self._turns.machine)

    def mapping(self) -> MappingCounts:
        return mapping_counts(self._turns.machine)
