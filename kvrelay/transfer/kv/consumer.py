"""The relay's consuming half as an engine sees it: `engine.movers.Consumer` around a transfer thread."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.fence import Fence
from kvrelay.engine.movers import Arrival, ConsumerNews
from kvrelay.ids import RequestId
from kvrelay.transfer.kv.counts import mapping_counts, transfer_counts
from kvrelay.transfer.kv.kind import KV
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.kv.plan import TransferMeta, transfer_meta
from kvrelay.transfer.kv.receiving import Receiving
from kvrelay.transfer.relay.consumer import ConsumerMachine
from kvrelay.transfer.relay.fenced import Fenced
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.transfer.relay.thread import clock
from kvrelay.transfer.relay.turns import ConsumerTurns, Front
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import TransferInfo

ReceivingMachine = ConsumerMachine[Receiving, KVLayout, ConsumerNews]


def expect(machine: ReceivingMachine, meta: TransferMeta, address: str, now: float) -> None:
    reason = machine.expect(meta.transfer_id, meta.peer, address, lambda link: Receiving(meta, link, machine.desk, now), now)
    if reason:
        machine.desk.news.arrived.append(Arrival(meta.request_id, [], error=reason))


def reserve(machine: ReceivingMachine, request_id: RequestId, blocks: tuple[int, ...], skip_tokens: int, now: float) -> None:
    if not machine.tell(request_id, lambda receiving: receiving.reserve(blocks, skip_tokens, now)):
        machine.desk.news.freed.append(request_id)  # it ended before, and the engine has been told


class RelayConsumer(Front[ConsumerTurns[KVLayout, ConsumerNews]]):
    """Takes KV over for a decode worker; implements `engine.movers.Consumer`."""

    def __init__(self, parts: RelayParts[KVLayout]) -> None:
        """Raises TransferError if a transport cannot register the region."""
        self._untold: set[RequestId] = set()  # the engine has not heard how they ended
        self._lent: set[RequestId] = set()  # the relay has blocks for them
        self._open: set[RequestId] = set()  # either
        self._fenced = Fenced()
        super().__init__(ConsumerTurns(KV, parts, ConsumerNews, self._fenced.look))

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        """Raises WrongIdError."""
        meta = transfer_meta(request_id, transfer, transfer.producer, num_tokens)
        self._untold.add(request_id)
        self._open.add(request_id)
        self._turns.call(lambda: expect(self._turns.machine, meta, transfer.signal_address, clock()))

    def reserve(self, request_id: RequestId, blocks: Sequence[int], skip_tokens: int, fence: Fence) -> None:
        given = tuple(blocks)
        self._lent.add(request_id)
        self._open.add(request_id)
        self._turns.call(
            lambda: self._fenced.put(fence, lambda: reserve(self._turns.machine, request_id, given, skip_tokens, clock()))
        )

    def abort(self, request_id: RequestId) -> None:
        self._untold.discard(request_id)
        self._forget_if_over(request_id)
        self._turns.call(lambda: self._turns.machine.tell(request_id, Receiving.abort))

    def poll(self) -> ConsumerNews:
        ended = self._turns.ended  # read first: what the thread said before its end must not be missed
        news = ConsumerNews()
        for each in self._turns.take_news():
            news.started += each.started
            news.arrived += each.arrived
            news.freed += each.freed
        for arrival in news.arrived:
            self._untold.discard(arrival.request_id)
            if not arrival.error:
                self._lent.discard(arrival.request_id)  # the blocks are the engine's, with what is in them
            self._forget_if_over(arrival.request_id)
        for request_id in news.freed:
            self._lent.discard(request_id)
            self._forget_if_over(request_id)
        if ended and self._open:
            self._tell_the_end(news, ended)
        elif not (news.arrived or news.freed):
            self._turns.raise_failure()
        return news

    def _forget_if_over(self, request_id: RequestId) -> None:
        if request_id not in self._untold and request_id not in self._lent:
            self._open.discard(request_id)

    def _tell_the_end(self, news: ConsumerNews, reason: str) -> None:
        """The thread has ended. Blocks are safe if the transports are closed, and else stay quarantined for ever."""
        news.arrived += [Arrival(request_id, [], error=reason) for request_id in self._untold]
        self._untold.clear()
        if self._turns.is_unreachable:
            news.freed += self._lent
            self._lent.clear()
        self._open = set(self._lent)

    def counts(self) -> TransferCounts:
        return transfer_counts(self._turns.machine)

    def mapping(self) -> MappingCounts:
        return mapping_counts(self._turns.machine)
