"""A prefill worker's hand-overs.

expect      the request is known. Samples beside the first give their first tokens at once, as sequences of one token; then
            the first sample's sequence, which finds the prompt in the cache, is the one whose blocks are handed over: so
            nothing is held for a peer before the hand-over can be finished
passes      the pass that ends the prompt begins: its blocks are known, and the relay has them from now on
output      its token is there: the relay is told all first tokens
poll        released: the core has the blocks back. Set aside: for now; the prompt is computed again when the peer has room
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.engine.fence import Fence
from kvrelay.engine.movers import Producer
from kvrelay.errors import UnavailableError
from kvrelay.ids import RequestId
from kvrelay.log import Log
from kvrelay.states import PROMPT_EDGES, FreeReason, PromptState, Stage, advance
from kvrelay.wire.serving import FirstToken, HandedOver
from kvrelay.worker.vllm.book import Book, PromptLogprobs
from kvrelay.worker.vllm.requests import Open, Sample
from kvrelay.worker.vllm.seam import CoreOutput, Hooks, Pass

log = Log("relay")

_COMPUTED = frozenset({PromptState.OFFERED, PromptState.ASKED, PromptState.SET_ASIDE})  # its request has left the book
_LENT = frozenset({PromptState.LENT, PromptState.OFFERED, PromptState.ASKED})  # the relay has its blocks


@dataclass(slots=True, eq=False)
class _Prompt:
    """One that is handed on. `carrier` is the sample whose sequence has the blocks."""

    open: Open
    carrier: Sample
    first_tokens: dict[int, FirstToken] = field(default_factory=dict)
    state: PromptState = PromptState.QUEUED

    def advance(self, state: PromptState) -> None:
        self.state = advance(PROMPT_EDGES, self.state, state)


class Sending(Hooks):
    """Implements the engine's `HandOver`."""

    def __init__(self, producer: Producer, book: Book, num_layers: int) -> None:
        self.mover = producer
        self._producer = producer
        self._book = book
        self._num_layers = num_layers
        self._prompts: dict[RequestId, _Prompt] = {}  # until released or aborted
        self._carriers: dict[str, _Prompt] = {}  # by their sequences
        self._leaving: dict[RequestId, str] = {}  # aborted, and the relay still has their blocks
        self._in_pass = False

    # What the engine does

    def begin(self, open_: Open) -> None:
        transfer = open_.submit.transfer
        assert transfer is not None
        carrier, *others = open_.samples.values()
        prompt = self._prompts[open_.id] = _Prompt(open_, carrier)
        self._producer.expect(open_.id, transfer, self._num_blocks(open_))
        for sample in others:
            self._book.run(open_, sample, most=1)
        if not others:
            self._carry(prompt)
        elif open_.id not in self._book.opens:  # the core refuses it
            self.abort(open_.id)

    def output(self, open_: Open, sample: Sample, output: CoreOutput) -> bool:
        """False if it is not handed on."""
        prompt = self._prompts.get(open_.id)
        if prompt is None:
            return False
        told = self._book.take_prompt_logprobs(open_, output)
        if not output.tokens:
            return True
        self._book.sequences.pop(output.id, None)
        if sample.number not in prompt.first_tokens:
            self._tell_first(prompt, sample, output, told)
        if sample is prompt.carrier:
            self._finish(prompt)
        elif len(prompt.first_tokens) == len(open_.samples) - 1:
            self._carry(prompt)
        return True

    def abort(self, request_id: RequestId) -> None:
        """Of a request that has been dropped from the book, or left it with its prompt computed."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        self._carriers.pop(prompt.carrier.sequence_id, None)
        if prompt.state in _LENT:
            self._leaving[request_id] = prompt.carrier.sequence_id
        if prompt.state in _COMPUTED:
            self._book.tell_over(prompt.open, FreeReason.ABORTED)
        self._producer.abort(request_id)

    def cut(self, _open: Open) -> None:
        """The router found the end of a sample. The others need the prompt all the same."""

    def poll(self) -> None:
        news = self._producer.poll()
        reasons = dict(news.failed)
        for request_id in news.set_aside:
            self._give_back(request_id)
            if (prompt := self._prompts.get(request_id)) is not None:
                prompt.advance(PromptState.SET_ASIDE)
        for request_id in news.restart:
            if (prompt := self._prompts.get(request_id)) is not None:
                prompt.advance(PromptState.QUEUED)
                self._book.opens[request_id] = prompt.open
                self._carry(prompt)
        for request_id in news.released:
            self._give_back(request_id)
            if (prompt := self._prompts.pop(request_id, None)) is not None:
                self._carriers.pop(prompt.carrier.sequence_id, None)
                self._released(prompt, reasons.get(request_id, ""), news.sent_bytes.get(request_id, 0))

    def make_room(self) -> None:
        """Asks the peer of the oldest computed prompt to do without its blocks for now."""
        for request_id, prompt in self._prompts.items():
            if prompt.state is PromptState.OFFERED:
                prompt.advance(PromptState.ASKED)
                self._producer.set_aside(request_id)
                return

    @property
    def num_waiting(self) -> int:
        return 0

    @property
    def num_transferring(self) -> int:
        return sum(prompt.state in _COMPUTED for prompt in self._prompts.values())

    @property
    def num_blocked(self) -> int:
        """Sequences in the core that cannot go on by themselves."""
        return 0

    @property
    def holds_blocks(self) -> bool:
        return bool(self._leaving) or bool(self.num_transferring)

    def counts(self) -> tuple[int, int, int]:
        """Blocks that are reserved for a peer's KV, held for a peer, and in quarantine."""
        return 0, sum(self._num_blocks(prompt.open) for prompt in self._prompts.values() if prompt.state in _LENT), 0

    def _num_blocks(self, open_: Open) -> int:
        return -(-len(open_.common) // self._book.core.block_size)

    def _carry(self, prompt: _Prompt) -> None:
        self._book.run(prompt.open, prompt.carrier, most=1)
        if prompt.open.id in self._book.opens:
            self._carriers[prompt.carrier.sequence_id] = prompt
        else:
            self.abort(prompt.open.id)

    def _tell_first(self, prompt: _Prompt, sample: Sample, output: CoreOutput, told: PromptLogprobs) -> None:
        open_, token = prompt.open, output.tokens[0]
        self._book.computed(open_, sample, output)
        entry = None if output.logprobs is None else output.logprobs[0]
        prompt.first_tokens[sample.number] = FirstToken(sample.number, token, entry, output.cached_tokens, told)
        finish = open_.finish_reason(sample.num_output + 1, token, self._book.core)
        self._book.tell(open_, sample, [token], finish, output.logprobs, told)

    def _finish(self, prompt: _Prompt) -> None:
        prompt.advance(PromptState.OFFERED)
        self._book.opens.pop(prompt.open.id, None)
        prompt.open.stages.enter(Stage.HAND_OVER)
        self._producer.finish(prompt.open.id, [prompt.first_tokens[number] for number in sorted(prompt.first_tokens)])

    def _give_back(self, request_id: RequestId) -> None:
        prompt = self._prompts.get(request_id)
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None:
            self._book.core.sent(leaving)
        elif prompt is not None and prompt.state in _LENT:
            self._book.core.sent(prompt.carrier.sequence_id)

    def _released(self, prompt: _Prompt, reason: str, sent_bytes: int) -> None:
        open_ = prompt.open
        if open_.id in self._book.opens:
            why = reason or "not wanted any more"
            self._book.fail(open_, UnavailableError(f"the hand-over to the decode worker failed: {why}"))
            return
        self._book.outbox.news.append(HandedOver(open_.id))
        self._book.tell_over(open_, FreeReason.FAILED if reason else FreeReason.HANDED_OVER)
        if not reason:
            transfer = open_.submit.transfer
            assert transfer is not None
            log.info(
                "KV handed over",
                request=open_.id, transfer=transfer.transfer_id, tokens=len(open_.common), bytes=sent_bytes,
                ms=round(1000 * open_.stages.seconds_in(Stage.HAND_OVER), 1), trace=transfer.trace_id,
            )  # fmt: skip

    # What the core asks and tells

    def passes(self, ending: Sequence[Pass], fence: Fence) -> None:
        rows: list[tuple[RequestId, int]] = []
        for one in ending:
            prompt = self._carriers.get(one.id)
            if prompt is not None:
                num_blocks = self._num_blocks(prompt.open)
                prompt.advance(PromptState.LENT)
                before = one.num_computed // self._book.core.block_size
                self._producer.start(prompt.open.id, list(one.blocks[:num_blocks]), before, fence)
                prompt.open.stages.enter(Stage.PREFILL)
                rows.append((prompt.open.id, num_blocks))
        self._in_pass = bool(rows)
        if rows:
            self._producer.begin_step(rows)

    def layer_done(self, layer: int, fence: Fence) -> None:
        if self._in_pass:
            self._producer.layer_done(layer, fence)

    def passed(self, fence: Fence) -> None:
        if self._in_pass:
            self._in_pass = False
            self._producer.layer_done(self._num_layers - 1, fence)
            self._producer.end_step()

    def holds(self, sequence_id: str) -> bool:
        prompt = self._carriers.get(sequence_id)
        return prompt is not None and prompt.state in _LENT
