"""From a request's fields to SamplingParams, and to the grammar its output must follow."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.errors import missing
from kvrelay.frontend.prompt.beams import beam_search
from kvrelay.frontend.prompt.types import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
)
from kvrelay.frontend.service import Service
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams

_draw = random.SystemRandom()
Shape = tuple[str, Grammar]  # the field that asks for a grammar, and the grammar


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
) -> SamplingParams:
    """Validated. The caller checks fields that have another name in the request."""
    beam = beam_search(request)
    bias = request.logit_bias or {}
    stop_tokens = request.stop_token_ids or []
    if bias:
        service.check_tokens(list(bias), "logit_bias")
    if stop_tokens:
        service.check_tokens(stop_tokens, "stop_token_ids")
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
        skip_special_tokens=request.skip_special_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        beam=beam,
    )
    params.validate()
    return params


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
            f"this model's context holds {limit} tokens; {num_prompt_tokens} of the prompt and {requested} of the output "
            f"are {num_prompt_tokens + requested}",
            param=field,
            code="context_length_exceeded",
        )
    return requested


def check_stream(request: SamplingFields) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream", param="stream_options")


def shape_of(request: SamplingFields) -> Shape | None:
    """The one grammar that a request asks for, in one of three ways."""
    guided = StructuredOutputs(
        json=request.guided_json, regex=request.guided_regex, choice=request.guided_choice, grammar=request.guided_grammar
    )
    shapes = [
        *_response_format(request.response_format),
        *_structured("guided_", guided),
        *_structured("structured_outputs.", request.structured_outputs or StructuredOutputs()),
    ]
    if len(shapes) > 1:
        raise InvalidRequestError(f"{shapes[1][0]} cannot be combined with {shapes[0][0]}", param=shapes[1][0])
    return shapes[0] if shapes else None


def _response_format(wanted: ResponseFormat | None) -> list[Shape]:
    if isinstance(wanted, JsonObjectFormat):
        return [("response_format", Grammar(kind=GrammarKind.JSON_OBJECT))]
    if isinstance(wanted, JsonSchemaFormat):
        if wanted.json_schema.schema is None:
            raise missing("response_format.json_schema.schema")
        return [("response_format", _json_schema(wanted.json_schema.schema))]
    return []


def _structured(prefix: str, wanted: StructuredOutputs) -> list[Shape]:
    found: list[Shape] = []
    if wanted.json is not None:
        found.append((f"{prefix}json", _json_schema(wanted.json)))
    if wanted.regex is not None:
        found.append((f"{prefix}regex", Grammar(kind=GrammarKind.REGEX, source=wanted.regex)))
    if wanted.choice is not None:
        choices = msgspec.json.encode(wanted.choice).decode()
        found.append((f"{prefix}choice", Grammar(kind=GrammarKind.CHOICE, source=choices)))
    if wanted.grammar is not None:
        found.append((f"{prefix}grammar", Grammar(kind=GrammarKind.LARK, source=wanted.grammar)))
    if wanted.json_object:
        found.append((f"{prefix}json_object", Grammar(kind=GrammarKind.JSON_OBJECT)))
    return found


def _json_schema(schema: dict[str, Any] | str) -> Grammar:
    source = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=source)
