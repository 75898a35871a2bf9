"""Beam search in requests: its fields, and the fields that it cannot be combined with."""

from __future__ import annotations

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.errors import refuse
from kvrelay.frontend.prompt.tools import ToolPlan
from kvrelay.frontend.prompt.types import ChatRequest, CompletionRequest, SamplingFields
from kvrelay.sampling import BeamSearch


def beam_search(request: SamplingFields) -> BeamSearch | None:
    """`SamplingParams.validate` refuses more, under the same field names."""
    if not request.use_beam_search:
        settings = {"beam_width": request.beam_width, "length_penalty": request.length_penalty,
                    "early_stopping": request.early_stopping}  # fmt: skip
        refuse(settings, "needs use_beam_search")
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
    if grammar_field:
        raise _refused(grammar_field)
    if request.best_of is not None:
        raise _refused("best_of")
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError("echo with logprobs cannot be combined with use_beam_search", param="echo")
    if request.max_tokens == 0:
        raise InvalidRequestError("max_tokens must be at least 1 with use_beam_search", param="max_tokens")


def check_chat(request: ChatRequest, tools: ToolPlan, grammar_field: str | None) -> None:
    if not request.use_beam_search:
        return
    if grammar_field:
        raise _refused(grammar_field)
    if tools.parse and tools.one_call:  # a call's end would be a stop string
        raise InvalidRequestError(
            "parallel_tool_calls: false cannot be combined with use_beam_search", param="parallel_tool_calls"
        )


def _refused(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} cannot be combined with use_beam_search", param=field)
