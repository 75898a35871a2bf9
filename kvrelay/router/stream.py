"""One request on its way through the router: its outputs in order, each exactly once, ending in exactly one way.

    deliver(output), fail(error)   called by the dispatcher as messages arrive, in any order, with repeats
    await next()                   called by the front end: everything new since the last call, merged
    finish(sample, ...), abort()   called by the front end: a stop string was found; the client left

Outputs are ordered by (sample, position). What was already seen is dropped; what comes early is held back until the gap closes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Protocol

from kvrelay.errors import InternalError, RequestError
from kvrelay.ids import RequestId, TransferId
from kvrelay.router.parent import Parent
from kvrelay.states import FinishReason
from kvrelay.wire.serving import BeamResult, Inherited, Resumed, SequenceOutput

_MAX_EARLY = 1024  # outputs held back behind a gap; more mean that what is missing will never come


class StreamOwner(Protocol):
    """The dispatcher, as its streams see it."""

    def stream_finished(self, stream: RequestStream) -> None:
        """Every sample has its finish reason, or the request failed. Called once."""

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        """Also of a sample that has ended further on; then the request may be over."""

    def send_abort(self, stream: RequestStream) -> None: ...


@dataclass(slots=True, eq=False)
class RequestStream:
    """Holds what the front end has not taken yet, and how far each sample has come."""

    request_id: RequestId
    num_samples: InitVar[int]
    _owner: StreamOwner
    _: KW_ONLY
    prefill: str = ""  # worker ids, for the response headers
    decode: str = ""
    data_parallel_rank: int = 0  # of the worker that generates
    encode: str = ""  # of the workers that make the embeddings of its images; empty for text
    transfer_id: TransferId | None = None  # of the hand-over, if two workers serve the request
    aborted: bool = field(default=False, init=False)
    beams: dict[int, BeamResult] = field(default_factory=dict, init=False)  # by sample; told before their tokens
    parents: list[Parent] = field(default_factory=list, init=False)  # its samples, as requests that continue from them see them
    inherited: Inherited | None = field(default=None, init=False)  # what it took of its own parent's KV
    error: RequestError | None = field(default=None, init=False)  # that ended it
    first_token_at: float = field(default=0.0, init=False)  # by the monotonic clock; 0 before it
    _tokens: list[list[int]] = field(init=False)
    _running: set[int] = field(init=False)
    _pending: list[SequenceOutput] = field(default_factory=list, init=False)
    _early: dict[tuple[int, int], SequenceOutput] = field(default_factory=dict, init=False)
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)

    def __post_init__(self, num_samples: int) -> None:
        self._tokens = [[] for _ in range(num_samples)]
        self._running = set(range(num_samples))

    @property
    def done(self) -> bool:
        """Nothing more will come after what is pending."""
        return not self._running or self.error is not None

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def running(self) -> list[int]:
        """Samples that have not ended; or had not, when the request failed."""
        return sorted(self._running)

    @property
    def has_tokens(self) -> bool:
        return any(self._tokens)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._tokens))

    def tokens(self, sample: int) -> list[int]:
        """All that has come of it so far; once it has ended, what its client saw."""
        return self._tokens[sample]

    def deliver(self, output: SequenceOutput) -> None:
        sample, position = output.sample, output.position
        if self.error is not None or sample not in self._running:
            return
        expected = len(self._tokens[sample])
        if position > expected:
            self._hold_back(output)
            return
        if position < expected:
            output = _without_first(output, expected - position)
            if not output.tokens and output.finish is None:
                return
        self._accept(output)
        while self._early and sample in self._running and (follower := self._take_held(sample)) is not None:
            self._accept(follower)
        if not self._running:
            self._owner.stream_finished(self)
        if self._waiter is not None:
            self._wake()

    def resume(self) -> list[Resumed]:
        """What another worker must know to go on: the tokens so far of the samples that have not ended. What was held
        back came of a worker that is gone, and is forgotten."""
        self._early.clear()
        return [Resumed(sample, list(self._tokens[sample])) for sample in sorted(self._running)]

    def fail(self, error: RequestError) -> None:
        if self.done:
            return
        self.error = error
        self._owner.stream_finished(self)
        self._wake()

    async def next(self) -> list[SequenceOutput]:
        """At least one output, or an empty list when the request is over. Raises the error that ended it."""
        while not self._pending:
            if self.error is not None:
                raise self.error
            if not self._running:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._pending = self._pending, []
        return taken

    def finish(self, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        """A normal end: the sample is cut after `keep_tokens` tokens and gets nothing more. Its worker may have ended it by
        itself, further on."""
        was_running = sample in self._running
        if self.error is not None or (not was_running and len(self._tokens[sample]) <= keep_tokens):
            return
        self._running.discard(sample)
        del self._tokens[sample][keep_tokens:]
        self._owner.send_finish(self, sample, keep_tokens, reason)
        if was_running and not self._running:
            self._owner.stream_finished(self)
            self._wake()

    def abort(self) -> None:
        """The client wants neither the rest nor what was not taken yet. Harmless when the request is over."""
        if self.done:
            return
        self.aborted = True
        for output in self._pending:
            if output.tokens:
                del self._tokens[output.sample][-len(output.tokens) :]
        self._pending.clear()
        self._owner.send_abort(self)
        self._running.clear()
        self._owner.stream_finished(self)
        self._wake()

    def _hold_back(self, output: SequenceOutput) -> None:
        held = self._early.get((output.sample, output.position))
        if held is not None and len(held.tokens) >= len(output.tokens):
            return
        if len(self._early) >= _MAX_EARLY:
            self.fail(InternalError("outputs of this request were lost between the worker and the router"))
        else:
            self._early[output.sample, output.position] = output

    def _take_held(self, sample: int) -> SequenceOutput | None:
        """An output that was held back and goes on where the sample is now; those that say nothing new are dropped."""
        expected = len(self._tokens[sample])
        for key in [key for key in self._early if key[0] == sample and key[1] <= expected]:
            output = _without_first(self._early.pop(key), expected - key[1])
            if output.tokens or output.finish is not None:
                return output
        return None

    def _accept(self, output: SequenceOutput) -> None:
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
        self._pending.append(output)
        self._tokens[output.sample] += output.tokens
        if output.finish is not None:
            self._running.discard(output.sample)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _without_first(output: SequenceOutput, count: int) -> SequenceOutput:
    return SequenceOutput(
        request_id=output.request_id,
        sample=output.sample,
        position=output.position + min(count, len(output.tokens)),
        tokens=output.tokens[count:],
        finish=output.finish,
        cached_tokens=output.cached_tokens,
        logprobs=None if output.logprobs is None else output.logprobs[count:],
        prompt_logprobs=output.prompt_logprobs,
    )
