"""From a request's fields to SamplingParams."""

from __future__ import annotations

import random
from typing import Any

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.beams import beam_search
from kvrelay.frontend.prompt.types import SamplingFields
from kvrelay.frontend.service import Service
from kvrelay.sampling import MAX_BIAS, Grammar, SamplingParams

_draw = random.SystemRandom()
_LONGEST_ID = 10  # digits of a token id


def sampling_params(
    service: Service,
    request: SamplingFields,
    *,
    samples: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None = None,
    extra_stop: tuple[str, ...] = (),
    keeps_special: bool = False,
) -> SamplingParams:
    """Validated. The caller checks fields that have another name in the request."""
    beam = beam_search(request)
    bias = _biases(service, request.logit_bias or {})
    stop_tokens, bad_words = request.stop_token_ids or [], request.bad_words or []
    named = {
        "stop_token_ids": stop_tokens,
        "allowed_token_ids": request.allowed_token_ids,
        "logprob_token_ids": request.logprob_token_ids,
    }
    for field, tokens in named.items():
        if tokens:
            service.check_tokens(tokens, field)
    params = SamplingParams(
        n=samples,
        temperature=_or(request.temperature, 1.0 if beam is None else 0.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=bias,
        seed=_draw.getrandbits(63) if request.seed is None else request.seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop=[*_stop_strings(request), *extra_stop],
        stop_token_ids=stop_tokens,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens and not keeps_special,
        ignore_eos=request.ignore_eos,
        allowed_token_ids=request.allowed_token_ids or [],
        bad_words=bad_words,
        bad_tokens=service.tokenizer.bad_tokens(bad_words),
        logprobs=logprobs,
        logprob_token_ids=request.logprob_token_ids or [],
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        beam=beam,
    )
    params.validate()
    return params


def _biases(service: Service, given: dict[str, Any]) -> dict[int, float]:
    """Refused with the key that is wrong."""
    last = service.tokenizer.vocab_size - 1
    found: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID and int(key) <= last):
            raise _wrong_bias(f"the key {key[:100]!r} is not a token id of this model (0 to {last})", "invalid_value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_bias(f"the value of {key!r} must be a number", "invalid_type")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            side = "above_max" if value > 0 else "below_min"
            raise _wrong_bias(f"the value of {key!r} must be between -{MAX_BIAS} and {MAX_BIAS}", f"decimal_{side}_value")
        found[int(key)] = float(value)
    return found


def _wrong_bias(problem: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"logit_bias: {problem}", param="logit_bias", code=code)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop_strings(request: SamplingFields) -> list[str]:
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop


def output_tokens(service: Service, requested: int | None, default: int | None, num_prompt_tokens: int, *, field: str,
                  prompt_field: str) -> int:  # fmt: skip
    """max_tokens: what was requested if it fits, else the default as far as it fits (None: all the room there is)."""
    room = service.room_after(num_prompt_tokens, prompt_field)
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room and service.backend.max_model_len:
        limit = service.backend.max_model_len
        raise InvalidRequestError(
            f"this model's maximum context length is {limit} tokens; {num_prompt_tokens} of the prompt and {requested} of the "
            f"output are {num_prompt_tokens + requested}",
            param=field,
            code="context_length_exceeded",
        )
    return requested


def check_stream(request: SamplingFields) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream", param="stream_options")
