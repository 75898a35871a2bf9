"""POST /v1/completions: one or many prompts, each with n choices; choice prompt * n + sample belongs to that prompt."""

from __future__ import annotations

import dataclasses
import time

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.answer.chunks import DONE, ChunkWriter, usage_of
from kvrelay.frontend.answer.generation import Generation, Sample, Step, Work
from kvrelay.frontend.answer.logprobs import LegacyLogprobs, prompt_logprobs
from kvrelay.frontend.answer.types import Completion, CompletionChoice, Usage
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.reading import BodyReader
from kvrelay.frontend.prompt.beams import check_completion, scores, stream_results
from kvrelay.frontend.prompt.continuation import as_extra, keep_s, missing, origin_of
from kvrelay.frontend.prompt.params import output_tokens, sampling_params, shape_of
from kvrelay.frontend.prompt.prompts import legacy_prompts
from kvrelay.frontend.prompt.types import CompletionRequest
from kvrelay.frontend.service import Service
from kvrelay.sampling import Grammar, SamplingParams
from kvrelay.states import FinishReason

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_CHOICES = 2048  # over all prompts of one request
_read = BodyReader(CompletionRequest)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """A request made ready."""

    request: CompletionRequest
    work: Work
    echoes: list[str]  # per prompt: the text that comes before its choices, "" without echo
    num_choices: int  # per prompt
    scores_only: bool  # max_tokens is 0: the one token that is generated nevertheless is not shown


async def completions(service: Service, call: Call) -> None:
    request = await _read(service, call)
    call.name("cmpl-", request.request_id or request.rid)
    plan = await _prepare(service, call, request)
    generation = Generation(service, call, plan.work, trace=call.trace())
    try:
        if request.stream and request.use_beam_search:
            await stream_results(call, generation, await _whole(service, call, plan, generation), request.stream_options)
        elif request.stream:
            await _CompletionStream(service, call, plan, generation).run()
        else:
            await call.answer_json(await _whole(service, call, plan, generation), generation.headers())
    finally:
        generation.close()


# Before


async def _prepare(service: Service, call: Call, request: CompletionRequest) -> _Plan:
    choices = request.n or 1
    best_of = choices if request.best_of is None else request.best_of
    _check_combinations(request, choices, best_of)
    shape = shape_of(request)
    check_completion(request, shape and shape[0])
    if shape is not None:
        await service.check_grammar(shape[1], shape[0])
    seconds = keep_s(service, request, obstacle=_obstacle(request, choices, best_of))
    origin = await origin_of(service, call, request)
    if origin is not None:
        prompts = [origin.prompt]
    elif request.prompt is not None:
        prompts = await legacy_prompts(service, request.prompt, add_special_tokens=request.add_special_tokens)
    else:
        raise missing("prompt")
    if len(prompts) * best_of > _MAX_CHOICES:
        raise InvalidRequestError(f"prompts times choices must be at most {_MAX_CHOICES}", param="prompt")
    if request.truncate_prompt_tokens is not None:
        prompts = [tokens[-request.truncate_prompt_tokens :] for tokens in prompts]
    params = [_params(service, request, tokens, best_of, shape and shape[1]) for tokens in prompts]
    return _Plan(
        request=request,
        work=Work(
            prompts=prompts,
            params=params,
            priority=request.priority,
            cache_salt=request.cache_salt or "",
            timeout_s=request.timeout,
            keep_s=seconds,
            origin=origin,
            images=() if origin is None else origin.parent.images,
        ),
        echoes=_echoes(service, request, prompts),
        num_choices=choices,
        scores_only=request.max_tokens == 0,
    )


def _obstacle(request: CompletionRequest, choices: int, best_of: int) -> str:
    """Why no KV can be kept: the client does not see all that is generated."""
    if request.use_beam_search:
        return "use_beam_search"
    if best_of > choices:
        return "best_of above n"
    return "max_tokens 0" if request.max_tokens == 0 else ""


def _check_combinations(request: CompletionRequest, choices: int, best_of: int) -> None:
    if best_of < choices:
        raise InvalidRequestError("best_of must be at least n", param="best_of")
    if request.stream and best_of > choices:
        raise InvalidRequestError("best_of above n cannot be streamed", param="best_of")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream", param="stream_options")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")


def _params(
    service: Service, request: CompletionRequest, tokens: list[int], best_of: int, grammar: Grammar | None
) -> SamplingParams:
    requested = 1 if request.max_tokens == 0 else request.max_tokens
    ranked = best_of > (request.n or 1)
    echoed = request.logprobs if request.echo else None
    return sampling_params(
        service,
        request,
        samples=best_of,
        max_tokens=output_tokens(
            service, requested, _DEFAULT_MAX_TOKENS, len(tokens), field="max_tokens", prompt_field=_prompt_field(request)
        ),
        logprobs=0 if ranked and request.logprobs is None else request.logprobs,
        prompt_logprobs=_larger(request.prompt_logprobs, echoed),
        grammar=grammar,
    )


def _prompt_field(request: CompletionRequest) -> str:
    return "prompt" if request.continuation_of is None else "continuation_of"


def _larger(one: int | None, other: int | None) -> int | None:
    counts = [count for count in (one, other) if count is not None]
    return max(counts) if counts else None


def _echoes(service: Service, request: CompletionRequest, prompts: list[list[int]]) -> list[str]:
    if not request.echo:
        return [""] * len(prompts)
    if request.truncate_prompt_tokens is None:
        if isinstance(request.prompt, str):
            return [request.prompt]
        texts = [entry for entry in request.prompt or () if isinstance(entry, str)]
        if texts:
            return texts
    skip = request.skip_special_tokens
    return [service.tokenizer.decode(tokens, skip_special_tokens=skip) for tokens in prompts]


# The whole answer at once


class _Choice:
    """One choice, added up."""

    __slots__ = ("logprobs", "sample", "text", "tokens")

    def __init__(self, service: Service, plan: _Plan, sample: Sample) -> None:
        self.sample = sample
        self.text = [plan.echoes[sample.prompt]]
        self.tokens: list[int] = []
        count = plan.request.logprobs
        self.logprobs = None if count is None else LegacyLogprobs(service.tokenizer, count)

    def add_prompt(self, plan: _Plan, generation: Generation) -> None:
        if self.logprobs is not None and plan.request.echo:
            place = self.sample.prompt
            self.logprobs.add_prompt(plan.work.prompts[place], generation.prompt_logprobs[place])

    def add(self, step: Step) -> None:
        self.text.append(step.text)
        if step.token is not None:
            self.tokens.append(step.token)
            if self.logprobs is not None:
                self.logprobs.add(step.token, step.logprobs)

    @property
    def mean_logprob(self) -> float:
        return self.sample.total_logprob / max(self.sample.num_tokens, 1)


async def _whole(service: Service, call: Call, plan: _Plan, generation: Generation) -> Completion:
    choices = [_Choice(service, plan, sample) for sample in generation.samples]
    begun = [False] * len(choices)
    while steps := await generation.next():
        for step in steps:
            index = step.sample.index
            if not begun[index]:
                begun[index] = True
                choices[index].add_prompt(plan, generation)
            if not plan.scores_only:
                choices[index].add(step)
    await generation.settle()
    return Completion(
        id=call.id,
        created=int(time.time()),
        model=service.model,
        choices=[_choice(service, plan, generation, choice, index) for index, choice in enumerate(_best(plan, choices))],
        usage=_usage(plan, generation),
        kvrelay=generation.provenance(),
    )


def _best(plan: _Plan, choices: list[_Choice]) -> list[_Choice]:
    """Of each prompt's samples the likeliest, by mean logprob of their tokens."""
    sampled = plan.work.params[0].n
    if sampled == plan.num_choices:
        return choices
    kept: list[_Choice] = []
    for start in range(0, len(choices), sampled):
        ranked = sorted(choices[start : start + sampled], key=lambda choice: -choice.mean_logprob)
        kept += ranked[: plan.num_choices]
    return kept


def _choice(service: Service, plan: _Plan, generation: Generation, choice: _Choice, index: int) -> CompletionChoice:
    request, place = plan.request, choice.sample.prompt
    prompt, entries = plan.work.prompts[place], generation.prompt_logprobs[place]
    shows_prompt = request.prompt_logprobs is not None and entries is not None
    assert choice.sample.finish is not None
    cumulative_logprob, beam_score = scores(generation.beam(choice.sample))
    return CompletionChoice(
        index=index,
        text="".join(choice.text),
        finish_reason="length" if plan.scores_only else choice.sample.finish.value,
        logprobs=None if choice.logprobs is None else choice.logprobs.take(),
        prompt_logprobs=prompt_logprobs(service.tokenizer, prompt, entries or []) if shows_prompt else msgspec.UNSET,
        token_ids=choice.tokens if request.return_token_ids else msgspec.UNSET,
        prompt_token_ids=prompt if request.return_token_ids else msgspec.UNSET,
        cumulative_logprob=cumulative_logprob,
        beam_score=beam_score,
        continuation=generation.continuation(choice.sample),
    )


def _usage(plan: _Plan, generation: Generation) -> Usage:
    written = 0 if plan.scores_only else generation.output_tokens
    return usage_of(generation.prompt_tokens, written, sum(generation.cached_tokens))


# Streamed


class _CompletionStream:
    """Writes one event per token, after one per choice with the prompt if that is echoed."""

    def __init__(self, service: Service, call: Call, plan: _Plan, generation: Generation) -> None:
        options = plan.request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._call = call
        self._plan = plan
        self._generation = generation
        count = plan.request.logprobs
        self._logprobs = None if count is None else [LegacyLogprobs(service.tokenizer, count) for _ in generation.samples]
        self._rich = count is not None or plan.request.return_token_ids or plan.scores_only
        self._begun = [not (plan.request.echo or plan.request.return_token_ids)] * len(generation.samples)
        self._writer = ChunkWriter(
            b'"text":',
            call.id,
            "text_completion",
            int(time.time()),
            service.model,
            usage=self._include_usage,
            continuous=self._continuous,
        )

    async def run(self) -> None:
        generation, call = self._generation, self._call
        steps = await generation.next()
        await call.start_stream(generation.headers())
        event = self._event
        while not generation.done:
            if any(step.finish for step in steps):
                await generation.settle()
            await call.write(b"".join([event(step) for step in steps]))
            steps = await generation.next()
        await generation.settle()
        extra = as_extra(generation.provenance())
        usage = [self._writer.usage(_usage(self._plan, generation), extra)] if self._include_usage else []
        await call.end_stream(b"".join([*[event(step) for step in steps], *usage, DONE]))

    def _event(self, step: Step) -> bytes:
        index = step.sample.index
        usage = _usage(self._plan, self._generation) if self._continuous else None
        if self._begun[index]:
            if not self._rich and (step.finish is None or not self._generation.says_more):
                return self._writer.text(index, step.text, b"", step.finish, usage)
            return self._rich_event(step, usage)
        self._begun[index] = True
        return self._prompt_event(step, usage) + self._event(step)

    def _prompt_event(self, step: Step, usage: Usage | None) -> bytes:
        plan, index, place = self._plan, step.sample.index, step.sample.prompt
        choice = {"index": index, "text": plan.echoes[place], "logprobs": None, "finish_reason": None}
        if self._logprobs is not None and plan.request.echo:
            self._logprobs[index].add_prompt(plan.work.prompts[place], self._generation.prompt_logprobs[place])
            choice["logprobs"] = self._logprobs[index].take()
        if plan.request.return_token_ids:
            choice["prompt_token_ids"] = plan.work.prompts[place]
        return self._writer.choice(choice, usage)

    def _rich_event(self, step: Step, usage: Usage | None) -> bytes:
        index, hidden = step.sample.index, self._plan.scores_only
        finish = FinishReason.LENGTH if hidden and step.finish is not None else step.finish
        choice = {
            "index": index,
            "text": "" if hidden else step.text,
            "logprobs": None,
            "finish_reason": None if finish is None else finish.value,
        }
        tokens = [] if hidden or step.token is None else [step.token]
        if self._logprobs is not None and tokens:
            self._logprobs[index].add(tokens[0], step.logprobs)
            choice["logprobs"] = self._logprobs[index].take()
        if self._plan.request.return_token_ids:
            choice["token_ids"] = tokens
        extra = self._generation.last_words(step, choice)
        return self._writer.choice(choice, usage, extra)
