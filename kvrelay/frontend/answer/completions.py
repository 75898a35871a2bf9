"""POST /v1/completions: one or several prompts with n choices each; choice prompt * n + sample belongs to that prompt."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from kvrelay.frontend.answer.chunks import ChunkWriter, last_bytes, usage_of
from kvrelay.frontend.answer.generation import Generation, Sample, Step
from kvrelay.frontend.answer.logprobs import LegacyLogprobs, prompt_logprobs
from kvrelay.frontend.answer.loop import Delivery, answer, delivery_of
from kvrelay.frontend.answer.types import Completion, CompletionChoice, CompletionLogprobs, Usage
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt.completion import CompletionPlan, prepare_completion
from kvrelay.frontend.prompt.types import CompletionRequest
from kvrelay.frontend.service import Service

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(service: Service, call: Call) -> None:
    request = await service.read(call, _decoder)
    call.name("cmpl-", request.request_id or request.rid)
    plan = await prepare_completion(service, call, request)
    delivery = delivery_of(request.stream, request.use_beam_search)
    await answer(service, call, plan.work, delivery, functools.partial(_Completion, service, call, plan, delivery))


class _Choice:
    """One sample, as far as it was generated."""

    __slots__ = ("begun", "logprobs", "sample", "text", "tokens")

    def __init__(self, service: Service, plan: CompletionPlan, sample: Sample) -> None:
        self.sample = sample
        self.begun = False
        self.text = [plan.echoes[sample.prompt]]
        self.tokens: list[int] = []
        request, self.logprobs = plan.request, None
        if request.logprobs is not None:
            num_top = max(request.logprobs, len(request.logprob_token_ids or ()))
            self.logprobs = LegacyLogprobs(service.tokenizer, num_top, hides_special=request.skip_special_tokens)

    def take_logprobs(self) -> CompletionLogprobs | None:
        return None if self.logprobs is None else self.logprobs.take()

    @property
    def mean_logprob(self) -> float:
        return self.sample.total_logprob / max(self.sample.num_tokens, 1)


class _Completion:
    """A `Shape`. Streamed, one event per token; if the prompt is shown, the first event of a choice has it."""

    shows_kept = True

    def __init__(self, service: Service, call: Call, plan: CompletionPlan, delivery: Delivery, generation: Generation) -> None:
        self._service = service
        self._call = call
        self._plan = plan
        self._request = plan.request
        self._delivery = delivery
        self._live = delivery is Delivery.EVENTS
        self._generation = generation
        self._choices = [_Choice(service, plan, sample) for sample in generation.samples]
        self._shows_prompt = bool(plan.request.echo) or plan.request.return_token_ids
        self._is_text = plan.request.logprobs is None and not plan.request.return_token_ids and not plan.scores_only
        name, options = service.answer_name(plan.request.model), plan.request.stream_options
        self._usage = functools.partial(_usage, generation, scores_only=plan.scores_only)
        self._chunks = ChunkWriter((b'"text":', b""), "text_completion", call, name, options, self._usage)

    def take(self, step: Step) -> bytes:
        choice = self._choices[step.sample.index]
        prompt = b"" if choice.begun else self._begin(choice)
        if not self._live:
            return self._collect(choice, step)
        if self._is_text and (step.finish is None or not self._generation.says_more):
            return prompt + self._chunks.text(step)
        return prompt + self._event(choice, step)

    def end(self) -> bytes:
        return last_bytes(self._delivery, self._chunks, self._generation, self._body, _results)

    def _begin(self, choice: _Choice) -> bytes:
        """Before a choice's first token: its prompt, if that is shown."""
        choice.begun = True
        plan, place = self._plan, choice.sample.prompt
        if choice.logprobs is not None and plan.request.echo:
            entries = self._generation.prompt_logprobs[place]
            choice.logprobs.add_prompt(plan.work.prompts[place], entries, plan.echoes[place])
        if not self._live or not self._shows_prompt:
            return b""
        logprobs = choice.take_logprobs() if plan.request.echo else None
        shown = {"index": choice.sample.index, "text": plan.echoes[place], "logprobs": logprobs, "finish_reason": None}
        if plan.request.return_token_ids:
            shown["prompt_token_ids"] = plan.work.prompts[place]
        return self._chunks.choice(shown)

    def _finish_reason(self, sample: Sample) -> str | None:
        if sample.finish is None:
            return None
        return "length" if self._plan.scores_only else sample.finish.value

    # The whole answer

    def _collect(self, choice: _Choice, step: Step) -> bytes:
        if not self._plan.scores_only:
            choice.text.append(step.text)
            if step.token is not None:
                choice.tokens.append(step.token)
                if choice.logprobs is not None:
                    choice.logprobs.add(step.token, step.logprobs)
        return b""

    def _body(self) -> Completion:
        return Completion(
            id=self._call.id,
            created=self._chunks.created,
            model=self._service.answer_name(self._request.model),
            choices=[self._shown(choice, index) for index, choice in enumerate(self._best())],
            usage=self._usage(),
            kvrelay=self._generation.provenance(),
        )

    def _best(self) -> list[_Choice]:
        """The likeliest of each prompt's samples, by mean logprob of their tokens."""
        num_sampled, num_shown = self._plan.work.params[0].n, self._plan.num_choices
        if num_sampled == num_shown:
            return self._choices
        best: list[_Choice] = []
        for start in range(0, len(self._choices), num_sampled):
            ranked = sorted(self._choices[start : start + num_sampled], key=lambda choice: -choice.mean_logprob)
            best += ranked[:num_shown]
        return best

    def _shown(self, choice: _Choice, index: int) -> CompletionChoice:
        request, place = self._request, choice.sample.prompt
        prompt, entries = self._plan.work.prompts[place], self._generation.prompt_logprobs[place]
        shows_scores = request.prompt_logprobs is not None and entries is not None
        finish_reason = self._finish_reason(choice.sample)
        assert finish_reason is not None
        cumulative_logprob, beam_score = self._generation.beam_scores(choice.sample)
        return CompletionChoice(
            index=index,
            text="".join(choice.text),
            finish_reason=finish_reason,
            stop_reason=choice.sample.stop_reason,
            logprobs=choice.take_logprobs(),
            prompt_logprobs=prompt_logprobs(self._service.tokenizer, prompt, entries or []) if shows_scores else None,
            token_ids=choice.tokens if request.return_token_ids else msgspec.UNSET,
            prompt_token_ids=prompt if request.return_token_ids else msgspec.UNSET,
            cumulative_logprob=cumulative_logprob,
            beam_score=beam_score,
            continuation=self._generation.continuation(choice.sample),
        )

    # Events

    def _event(self, choice: _Choice, step: Step) -> bytes:
        hidden = self._plan.scores_only
        tokens = [] if hidden or step.token is None else [step.token]
        logprobs = None
        if choice.logprobs is not None and tokens:
            choice.logprobs.add(tokens[0], step.logprobs)
            logprobs = choice.take_logprobs()
        shown: dict[str, Any] = {
            "index": step.sample.index,
            "text": "" if hidden else step.text,
            "logprobs": logprobs,
            "finish_reason": None if step.finish is None else self._finish_reason(step.sample),
        }
        if step.finish is not None:
            shown["stop_reason"] = step.sample.stop_reason
        if self._request.return_token_ids:
            shown["token_ids"] = tokens
        extra = self._generation.last_words(step, shown)
        return self._chunks.choice(shown, extra)


def _usage(generation: Generation, *, scores_only: bool) -> Usage:
    written = 0 if scores_only else generation.output_tokens
    return usage_of(generation.prompt_tokens, written, sum(generation.cached_tokens))


def _results(body: Completion) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(choice) for choice in body.choices]
