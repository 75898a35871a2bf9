"""The bodies of chats and completions. Events of a stream are written as bytes (`chunks.py`), responses as they grow."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything below."""


class PromptTokensDetails(Output, frozen=True, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Output, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class Usage(Output, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Output, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Output, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Output, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AnswerFunction(Output, frozen=True, kw_only=True):
    name: str
    arguments: str


class AnswerToolCall(Output, frozen=True, kw_only=True):
    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class AnswerMessage(Output, frozen=True, kw_only=True, omit_defaults=True):
    content: str | None
    role: str  # always "assistant"; no default, so that it is always written
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None
    function_call: AnswerFunction | None = None  # instead of tool_calls, for clients that sent `functions`


class Continuation(Output, frozen=True, kw_only=True):
    """Whether a choice's KV is kept. It can be continued from under this id in either case."""

    id: str
    kept: bool
    expires_at: int | msgspec.UnsetType = msgspec.UNSET  # Unix time
    expires_in_s: float | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET  # why it is not kept


Source = Literal["lease", "prefix_cache", "prefill", "prompt"]
Continued = Literal["parent", "prefill"]


class ContinuationSource(Output, frozen=True, kw_only=True):
    """Where the KV of a continuation's prompt came from."""

    of: str
    source: Source
    inherited_tokens: int  # of kept KV
    computed_tokens: int


class Provenance(Output, frozen=True, kw_only=True):
    """kvrelay's own part of an answer."""

    continuation: ContinuationSource
    continued: Continued  # the parent's tokens were the prompt, or were gone: the given prompt was computed instead


class ChatChoice(Output, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    finish_reason: str
    stop_reason: str | int | None = None  # the stop string or the stop token that ended it
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    cumulative_logprob: float | msgspec.UnsetType = msgspec.UNSET  # of beam search, as the next
    beam_score: float | msgspec.UnsetType = msgspec.UNSET
    continuation: Continuation | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Output, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kvrelay: Provenance | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(Output, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None = None  # the stop string or the stop token that ended it
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[Any] | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    cumulative_logprob: float | msgspec.UnsetType = msgspec.UNSET  # of beam search, as the next
    beam_score: float | msgspec.UnsetType = msgspec.UNSET
    continuation: Continuation | msgspec.UnsetType = msgspec.UNSET


class Completion(Output, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    kvrelay: Provenance | msgspec.UnsetType = msgspec.UNSET
