"""A prefill worker's hand-overs, the engine's side. The `Producer` behind it talks to the peer and moves bytes.

expect      the request is known
begin_step  its prompt has blocks (what the prefix cache gave can be sent at once), and is being computed
finished    the prompt is computed and its first tokens are sampled: the blocks stay for the peer
set_aside   under pressure: a finished prompt that its peer has no room for yet goes back into the prefix cache
poll        released: the blocks come back; set aside: they come back for now; restart: compute it again
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.engine.fence import Fence
from kvrelay.engine.interfaces import StepPlan
from kvrelay.engine.memory.block_pool import Holder
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.movers import Producer
from kvrelay.engine.request import Sequence
from kvrelay.ids import RequestId
from kvrelay.wire.serving import FirstToken, Submit


class Outgoing:
    """Which prompts are being handed on, and the blocks kept for their peers."""

    def __init__(self, producer: Producer, kv: KVCache, fence: Callable[[], Fence]) -> None:
        self.producer = producer
        self._kv = kv
        self._fence = fence
        self._submits: dict[RequestId, Submit] = {}  # from expect until released or aborted
        self._started: set[RequestId] = set()  # the producer was told of their blocks
        self._first_tokens: dict[RequestId, list[FirstToken]] = {}  # of prompts that finished, also when set aside since
        self._being_set_aside: set[RequestId] = set()
        self._in_step = False  # prompts to be handed on are being computed right now
        self.held: dict[RequestId, list[int]] = {}  # blocks of prompts that ended here

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._submits

    def expect(self, submit: Submit, num_tokens: int) -> None:
        """`num_tokens` is what there is to compute before the hand-over: the prompt, and what another worker made of it."""
        assert submit.transfer is not None
        self._submits[submit.request_id] = submit
        self.producer.expect(submit.request_id, submit.transfer, num_tokens)

    def begin_step(self, plan: StepPlan) -> None:
        if not self._submits:
            return
        rows = []
        for row in plan.rows:
            request_id = row.sequence.request_id
            if request_id in self._submits:
                if request_id not in self._started:
                    self._started.add(request_id)
                    self.producer.start(request_id, row.sequence.block_table, row.start, self._fence())
                rows.append((request_id, row.start + row.count))
        self._in_step = bool(rows)
        if rows:
            self.producer.begin_step(rows)

    def layer_done(self, layer: int, fence: Fence) -> None:
        if self._in_step:
            self.producer.layer_done(layer, fence)

    def end_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self.producer.end_step()

    def finished(self, sequence: Sequence, first_tokens: list[FirstToken]) -> bool:
        """Takes the blocks over. False if this was a restart, whose first tokens are known and were told."""
        request_id = sequence.request_id
        is_new = request_id not in self._first_tokens
        known = self._first_tokens.setdefault(request_id, first_tokens)
        self.held[request_id] = self._kv.send(sequence)
        self.producer.finish(request_id, known)
        return is_new

    def abort(self, sequence: Sequence) -> None:
        """The sequence ends before its prompt is computed. Blocks it has are kept until the peer cannot touch them."""
        if sequence.request_id in self._started:
            self.held[sequence.request_id] = self._kv.send(sequence)
        self.abort_finished(sequence.request_id)

    def abort_finished(self, request_id: RequestId) -> None:
        """The hand-over is not wanted any more. Harmless if it is over. Blocks that were given come back through `poll`; where
        none were, or they came back when it was set aside, nothing more will be said of it: so it is forgotten here."""
        if self._submits.pop(request_id, None) is not None:
            self._first_tokens.pop(request_id, None)
            self.producer.abort(request_id)

    def set_one_aside(self) -> None:
        """Asks the peer of the oldest finished prompt to do without its blocks for now. An aborted one would not answer."""
        for request_id in self.held:
            if request_id in self._submits and request_id not in self._being_set_aside:
                self._being_set_aside.add(request_id)
                self.producer.set_aside(request_id)
                return

    def poll(self) -> tuple[list[Submit], list[tuple[RequestId, str, int]]]:
        """Prompts to compute once more, and hand-overs that ended: why, if they failed, and the bytes of those that did not."""
        news = self.producer.poll()
        for request_id in news.set_aside:
            self._give_back(request_id)
        restarts = [self._submits[request_id] for request_id in news.restart if request_id in self._submits]
        reasons = dict(news.failed)
        for request_id in news.released:
            self._give_back(request_id)
            self._submits.pop(request_id, None)
            self._first_tokens.pop(request_id, None)
        sent = news.sent_bytes
        return restarts, [(request_id, reasons.get(request_id, ""), sent.get(request_id, 0)) for request_id in news.released]

    def _give_back(self, request_id: RequestId) -> None:
        self._being_set_aside.discard(request_id)
        self._started.discard(request_id)
        self._kv.release(self.held.pop(request_id, []), Holder.SENDING)
