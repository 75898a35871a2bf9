"""Beam search as HTTP asks for it: its fields, what they cannot be combined with, and how its results are streamed.

There is no result before the search has ended. A stream then gets one event per choice, with all of its text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.answer.chunks import DONE, ChunkWriter
from kvrelay.frontend.answer.generation import Generation
from kvrelay.frontend.answer.types import AnswerMessage, ChatChoice, ChatCompletion, Completion, CompletionChoice
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt.continuation import as_extra
from kvrelay.frontend.prompt.tools import ToolPlan
from kvrelay.frontend.prompt.types import ChatRequest, CompletionRequest, SamplingFields, StreamOptions
from kvrelay.sampling import BeamSearch
from kvrelay.wire.serving import BeamResult

Score = float | msgspec.UnsetType


# Before


def beam_search(request: SamplingFields) -> BeamSearch | None:
    """What `SamplingParams.validate` refuses beside a search is left to it: its names are the request's."""
    if not request.use_beam_search:
        settings = {
            "beam_width": request.beam_width,
            "length_penalty": request.length_penalty,
            "early_stopping": request.early_stopping,
        }
        for field, value in settings.items():
            if value is not None:
                raise InvalidRequestError(f"{field} needs use_beam_search", param=field)
        return None
    num_choices = request.n or 1
    width = num_choices if request.beam_width is None else request.beam_width
    if num_choices > width:
        raise InvalidRequestError(f"n must be at most beam_width ({width})", param="n")
    return BeamSearch(
        width=width,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=False if request.early_stopping is None else request.early_stopping,
    )


def check_completion(request: CompletionRequest, grammar_field: str | None) -> None:
    if not request.use_beam_search:
        return
    _check_grammar(grammar_field)
    if request.best_of is not None:
        raise _refused("best_of")
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError("echo with logprobs cannot be combined with use_beam_search", param="echo")
    if request.max_tokens == 0:
        raise InvalidRequestError("max_tokens must be at least 1 with use_beam_search", param="max_tokens")


def check_chat(request: ChatRequest, tools: ToolPlan, grammar_field: str) -> None:
    if not request.use_beam_search:
        return
    _check_grammar(grammar_field)
    if tools.parse and tools.one_call:  # its end is a stop string
        raise InvalidRequestError(
            "parallel_tool_calls: false cannot be combined with use_beam_search", param="parallel_tool_calls"
        )


def _check_grammar(field: str | None) -> None:
    if field:
        raise _refused(field)


def _refused(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} cannot be combined with use_beam_search", param=field)


# After


def scores(beam: BeamResult | None) -> tuple[Score, Score]:
    """cumulative_logprob and beam_score of a choice."""
    return (msgspec.UNSET, msgspec.UNSET) if beam is None else (beam.cumulative_logprob, beam.score)


async def stream_results(
    call: Call, generation: Generation, answer: Completion | ChatCompletion, options: StreamOptions | None
) -> None:
    """`answer` is what would be sent without a stream."""
    include_usage = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    is_chat = isinstance(answer, ChatCompletion)
    writer = ChunkWriter(
        b"",
        answer.id,
        "chat.completion.chunk" if is_chat else answer.object,
        answer.created,
        answer.model,
        usage=include_usage,
        continuous=continuous,
    )
    chunks = _chat_chunks(answer) if isinstance(answer, ChatCompletion) else _completion_chunks(answer)
    extra = as_extra(answer.kvrelay)
    events = [writer.choice(chunk, answer.usage if continuous else None, extra) for chunk in chunks]
    if include_usage:
        events.append(writer.usage(answer.usage, extra))
    await call.start_stream(generation.headers())
    await call.end_stream(b"".join([*events, DONE]))


def _completion_chunks(answer: Completion) -> list[dict[str, Any]]:
    return [_builtins(choice) for choice in answer.choices]


def _chat_chunks(answer: ChatCompletion) -> list[dict[str, Any]]:
    chunks = []
    for choice in answer.choices:
        chunk = _builtins(choice)
        chunk["delta"] = _builtins(choice.message)
        del chunk["message"]
        for place, tool_call in enumerate(chunk["delta"].get("tool_calls", ())):
            tool_call["index"] = place
        if not isinstance(answer.prompt_token_ids, msgspec.UnsetType):
            chunk["prompt_token_ids"] = answer.prompt_token_ids
        chunks.append(chunk)
    return chunks


def _builtins(part: CompletionChoice | ChatChoice | AnswerMessage) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(part)
    return built
