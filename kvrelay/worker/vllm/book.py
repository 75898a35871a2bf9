"""Requests of a worker that have not ended, the sequences that a core computes for them, and what routers are to be told."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.engine.outbox import Outbox
from kvrelay.errors import InternalError, RequestError
from kvrelay.ids import RequestId
from kvrelay.states import FinishReason, FreeReason
from kvrelay.wire.serving import SequenceOutput, Submit, TokenLogprobs
from kvrelay.worker.vllm.requests import Open, Sample
from kvrelay.worker.vllm.seam import Core, CoreOutput

PromptLogprobs = list[TokenLogprobs | None] | None


class Book:
    """Each request ends here, once."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.outbox = Outbox()
        self.opens: dict[RequestId, Open] = {}
        self.sequences: dict[str, tuple[Open, Sample]] = {}
        self.on_over: Callable[[Submit, FreeReason], None] = lambda *_: None

    def run(self, open_: Open, sample: Sample, *, most: int | None = None) -> None:
        """Fails the request if the core cannot serve it."""
        if open_.id not in self.opens:
            return  # another sample's failure ended it
        request = open_.sequence(sample, most=most)
        try:
            self.core.add(request)
        except RequestError as error:
            self.fail(open_, error)
            return
        sample.sequence_id = request.id
        self.sequences[request.id] = (open_, sample)

    def take_prompt_logprobs(self, open_: Open, output: CoreOutput) -> PromptLogprobs:
        """All of them, with the first token of the sample that asked for them."""
        open_.prompt_logprobs += output.prompt_logprobs
        is_asked = open_.params.prompt_logprobs is not None and output.id == f"{open_.id}/0"
        return open_.prompt_logprobs if is_asked and output.tokens else None

    def tell(
        self,
        open_: Open,
        sample: Sample,
        tokens: list[int],
        finish: FinishReason | None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: PromptLogprobs = None,
    ) -> None:
        position = sample.num_output
        sample.num_output += len(tokens)
        self.outbox.num_output_tokens += len(tokens)
        self.outbox.outputs.append(
            SequenceOutput(
                open_.id, sample.number, position, tokens, finish, sample.cached_tokens, logprobs,
                None if position else prompt_logprobs,
            )
        )  # fmt: skip

    def computed(self, open_: Open, sample: Sample, output: CoreOutput) -> None:
        """A core's first tokens of a sample."""
        sample.cached_tokens = output.cached_tokens
        self.outbox.num_cached_tokens += output.cached_tokens
        self.outbox.num_prompt_tokens += len(open_.submit.prompt) + len(sample.forced) - output.cached_tokens

    def end(self, open_: Open, sample: Sample) -> None:
        """A sample. With the last one its request ends."""
        sample.is_open = False
        self.sequences.pop(sample.sequence_id, None)
        if not open_.going:
            self.forget(open_, FreeReason.FINISHED)

    def stop(self, open_: Open, sample: Sample) -> None:
        """The same while the core computes it."""
        if sample.sequence_id in self.sequences:
            self.core.abort([sample.sequence_id])
        self.end(open_, sample)

    def drop(self, open_: Open, reason: FreeReason = FreeReason.ABORTED) -> list[int]:
        """All of a request at once: the samples that were open."""
        going = open_.going
        running = [sample.sequence_id for sample in going if self.sequences.pop(sample.sequence_id, None) is not None]
        if running:
            self.core.abort(running)
        for sample in going:
            sample.is_open = False
        self.forget(open_, reason)
        return [sample.number for sample in going]

    def fail(self, open_: Open, error: RequestError) -> None:
        if open_.id in self.opens:
            self.drop(open_, FreeReason.FAILED)
            self.outbox.fail(open_.id, error)

    def forget(self, open_: Open, reason: FreeReason) -> None:
        if self.opens.pop(open_.id, None) is not None:
            self.tell_over(open_, reason)

    def tell_over(self, open_: Open, reason: FreeReason) -> None:
        """Routers hear how long it took, and those that follow the cache that it is over here."""
        self.outbox.news.append(open_.stages.times(open_.id))
        self.on_over(open_.submit, reason)

    def errored(self, open_: Open) -> None:
        self.fail(open_, InternalError("vLLM could not compute the request"))
