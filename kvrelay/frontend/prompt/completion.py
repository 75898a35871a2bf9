"""A request for legacy completions made ready: one or several prompts in four forms, each with n choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import missing, too_short
from kvrelay.frontend.prompt.beams import check_completion
from kvrelay.frontend.prompt.continuation import keep_s, origin_of
from kvrelay.frontend.prompt.params import check_stream, output_tokens, sampling_params
from kvrelay.frontend.prompt.shapes import shape_of
from kvrelay.frontend.prompt.types import CompletionRequest
from kvrelay.frontend.prompt.work import Origin, Work
from kvrelay.frontend.service import Service
from kvrelay.sampling import Grammar, SamplingParams

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_CHOICES = 2048  # over all prompts of one request


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionPlan:
    """Ready to be generated."""

    request: CompletionRequest
    work: Work
    echoes: list[str]  # per prompt: the text that comes before its choices, "" without echo
    num_choices: int  # per prompt
    scores_only: bool  # max_tokens is 0: one token is generated all the same, and not shown


async def prepare_completion(service: Service, call: Call, request: CompletionRequest) -> CompletionPlan:
    """Refuses all that can be refused, before a worker sees the request."""
    choices = request.n or 1
    best_of = choices if request.best_of is None else request.best_of
    _check_combinations(request, choices, best_of)
    field, grammar = shape_of(request, service.tokenizer) or (None, None)
    check_completion(request, field)
    if field is not None and grammar is not None:
        await service.check_grammar(grammar, field)
    seconds = keep_s(service, request, obstacle=_obstacle(request, choices, best_of))
    origin = await origin_of(service, call, request)
    if isinstance(origin, Origin):
        prompts = [origin.prompt]
    elif request.prompt is None:
        raise missing("prompt")
    elif not request.prompt:
        raise too_short("prompt", request.prompt)
    else:
        prompts = await _prompts(service, request.prompt, add_special_tokens=request.add_special_tokens)
    if len(prompts) * best_of > _MAX_CHOICES:
        raise InvalidRequestError(f"prompts times choices must be at most {_MAX_CHOICES}", param="prompt")
    if request.truncate_prompt_tokens is not None:
        prompts = [tokens[-request.truncate_prompt_tokens :] for tokens in prompts]
    prompt_field = "continuation_of" if isinstance(origin, Origin) else "prompt"
    params = [_params(service, request, tokens, best_of, grammar, prompt_field) for tokens in prompts]
    return CompletionPlan(
        request=request,
        work=Work(request, prompts, params, seconds, origin, origin.parent.images if isinstance(origin, Origin) else ()),
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
    check_stream(request)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")


def _params(
    service: Service,
    request: CompletionRequest,
    tokens: list[int],
    best_of: int,
    grammar: Grammar | None,
    prompt_field: str,
) -> SamplingParams:
    requested = 1 if request.max_tokens == 0 else request.max_tokens
    ranked = best_of > (request.n or 1)
    shown = [count for count in (request.prompt_logprobs, request.logprobs if request.echo else None) if count is not None]
    return sampling_params(
        service,
        request,
        samples=best_of,
        max_tokens=output_tokens(
            service, requested, _DEFAULT_MAX_TOKENS, len(tokens), field="max_tokens", prompt_field=prompt_field
        ),
        logprobs=0 if ranked and request.logprobs is None else request.logprobs,
        prompt_logprobs=max(shown, default=None),
        grammar=grammar,
    )


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


# The four forms of a prompt


async def _prompts(service: Service, prompt: str | list[str | int | list[int]], *, add_special_tokens: bool) -> list[list[int]]:
    """One list of token ids per prompt."""
    if isinstance(prompt, str):
        return [_checked(service, await service.encode(prompt, add_special_tokens=add_special_tokens), "prompt")]
    if isinstance(prompt[0], int):
        return [_tokens(service, prompt, "prompt")]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    if len(texts) == len(prompt):
        encoded = await service.off_loop_if_long(
            sum(map(len, texts)), lambda: service.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        )
        return [_checked(service, tokens, f"prompt[{place}]") for place, tokens in enumerate(encoded)]
    lists: list[list[int]] = []
    for place, entry in enumerate(prompt):
        if not isinstance(entry, list):
            raise _mixed(f"prompt[{place}]")
        lists.append(_tokens(service, entry, f"prompt[{place}]"))
    return lists


def _tokens(service: Service, entries: Sequence[str | int | list[int]], field: str) -> list[int]:
    tokens = [entry for entry in entries if isinstance(entry, int)]
    if len(tokens) != len(entries):
        raise _mixed(field)
    service.check_tokens(tokens, field)
    return _checked(service, tokens, field)


def _checked(service: Service, tokens: list[int], field: str) -> list[int]:
    if not tokens:
        raise InvalidRequestError(f"{field} is empty", param=field, code="empty_prompt")
    service.images.check_text(tokens, field)
    return tokens


def _mixed(field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field}: a prompt must be a text, a list of texts, a list of token ids, or a list of such lists", param=field
    )
