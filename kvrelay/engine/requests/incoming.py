"""A decode worker's hand-overs, the engine's side. The `Consumer` behind it talks to the peer and moves bytes.

expect    the request is known; it holds no blocks
reserve   the peer has begun, and there is room here: blocks for what the prefix cache does not have,
          and for the next token                                                                         -> TRANSFERRING
poll      arrived: the sequence runs from its first token on                                             -> RUNNING
          failed: the request is over here; the router sends it again, perhaps to another worker         -> FINISHED
          freed: blocks of a failed or aborted transfer are safe again
"""

from __future__ import annotations

import heapq

from kvrelay.engine.interfaces import Runner
from kvrelay.engine.memory.block_pool import Holder
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.movers import Arrival, Consumer
from kvrelay.engine.request import Sequence
from kvrelay.ids import RequestId
from kvrelay.states import RequestState
from kvrelay.wire.serving import TransferInfo


class Incoming:
    """The sequences whose KV comes from elsewhere, until it is there."""

    def __init__(self, consumer: Consumer, kv: KVCache, runner: Runner) -> None:
        self.consumer = consumer
        self._kv = kv
        self._runner = runner
        self._expected: dict[RequestId, Sequence] = {}  # from expect until arrived, failed or aborted
        self.startable: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; those that ended are skipped when met
        self._freed: set[RequestId] = set()  # said to be safe before the transfer was said to have failed
        self.quarantined: dict[RequestId, list[int]] = {}

    @property
    def transferring(self) -> list[Sequence]:
        return [sequence for sequence in self._expected.values() if sequence.state is RequestState.TRANSFERRING]

    @property
    def waiting(self) -> list[Sequence]:
        """They hold no blocks yet."""
        return [sequence for sequence in self._expected.values() if sequence.state is RequestState.WAITING]

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._expected

    def expect(self, sequence: Sequence, transfer: TransferInfo) -> None:
        self._expected[sequence.request_id] = sequence
        self.consumer.expect(sequence.request_id, transfer, len(sequence.tokens))

    def reserve(self, num_rows: int, headroom: int, before: tuple[int, int, int] | None = None) -> bool:
        """Blocks for those whose peer has begun, in order, while `num_rows` rows of the batch and the pool last; only for those
        that come before `before`, if that is given. False if one of them has to wait."""
        reserved: list[Sequence] = []
        have_all = self._reserve(num_rows, headroom, before, reserved)
        if reserved:
            self._runner.expect(reserved)
        return have_all

    def _reserve(self, num_rows: int, headroom: int, before: tuple[int, int, int] | None, reserved: list[Sequence]) -> bool:
        while self.startable:
            sequence = self.startable[0][1]
            if self._expected.get(sequence.request_id) is sequence and sequence.state is RequestState.WAITING:
                if before is not None and sequence.order > before:
                    return True
                if sequence.num_batch_rows > num_rows or not self._kv.attach(sequence, headroom=headroom, num_more_tokens=1):
                    return False
                num_rows -= sequence.num_batch_rows
                sequence.become(RequestState.TRANSFERRING)
                sequence.cached_tokens = skip_tokens = sequence.num_computed
                self.consumer.reserve(sequence.request_id, self._kv.reserve(sequence), skip_tokens, self._runner.fence())
                reserved.append(sequence)
            heapq.heappop(self.startable)
        return True

    def abort(self, sequence: Sequence) -> None:
        """The request ended in any other way."""
        request_id = sequence.request_id
        del self._expected[request_id]
        self._drop_blocks(sequence)
        sequence.become(RequestState.FINISHED)
        self.consumer.abort(request_id)

    def poll(self) -> list[tuple[Sequence, Arrival]]:
        """The sequences whose transfer ended. With an error, they have finished and hold nothing."""
        news = self.consumer.poll()
        for request_id in news.started:
            sequence = self._expected.get(request_id)
            if sequence is not None and sequence.state is RequestState.WAITING:
                heapq.heappush(self.startable, (sequence.order, sequence))
        for request_id in news.freed:
            if request_id in self.quarantined:
                self._end_quarantine(request_id)
            elif request_id in self._expected:
                self._freed.add(request_id)
        return [(sequence, arrival) for arrival in news.arrived if (sequence := self._arrive(arrival)) is not None]

    def _arrive(self, arrival: Arrival) -> Sequence | None:
        sequence = self._expected.pop(arrival.request_id, None)
        if sequence is None:
            if not arrival.error and arrival.request_id in self.quarantined:
                self._end_quarantine(arrival.request_id)  # the last byte crossed the abort: `freed` will not be told
            return None
        if arrival.error:
            self._drop_blocks(sequence)
            sequence.become(RequestState.FINISHED)
        else:
            self._kv.received(sequence, len(sequence.tokens))
        return sequence

    def _end_quarantine(self, request_id: RequestId) -> None:
        self._kv.release(self.quarantined.pop(request_id), Holder.QUARANTINED)

    def _drop_blocks(self, sequence: Sequence) -> None:
        if sequence.state is not RequestState.TRANSFERRING:
            return
        blocks = self._kv.quarantine(sequence)
        if sequence.request_id in self._freed:
            self._freed.discard(sequence.request_id)
            self._kv.release(blocks, Holder.QUARANTINED)
        else:
            self.quarantined[sequence.request_id] = blocks
