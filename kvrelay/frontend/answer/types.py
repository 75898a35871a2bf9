"""What clients receive, other than the events of a stream, which are written as bytes (`stream.py`)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything we answer."""


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


class TokenLogprob(Output, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Output, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Output, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
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


class Continuation(Output, frozen=True, kw_only=True):
    """Whether a choice's KV is kept, and the name under which it can be continued from either way."""

    id: str
    kept: bool
    expires_at: int | msgspec.UnsetType = msgspec.UNSET  # Unix time
    expires_in_s: float | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET  # why it is not kept


class ContinuationSource(Output, frozen=True, kw_only=True):
    """Where the KV of a continuation's prompt came from."""

    of: str
    source: Literal["lease", "prefix_cache", "prefill"]
    inherited_tokens: int  # of the lease
    computed_tokens: int  # anew


class Provenance(Output, frozen=True, kw_only=True):
    """What only kvrelay has to say."""

    continuation: ContinuationSource


class ContinuationHandle(Output, frozen=True, kw_only=True):
    """A request that can be continued from, as GET /v1/continuations shows it."""

    id: str
    request_id: str
    choice: int
    state: str
    tokens: int  # prompt and output; 0 while it runs
    prompt_tokens: int
    blocks: int  # of KV, that its worker holds for it
    expires_at: int | None
    worker: str | None
    reason: str | None  # why nothing is held
    object: Literal["continuation"] = "continuation"


class ContinuationList(Output, frozen=True, kw_only=True):
    data: list[ContinuationHandle]
    object: Literal["list"] = "list"


class ContinuationDeleted(Output, frozen=True, kw_only=True):
    id: str
    object: Literal["continuation.deleted"] = "continuation.deleted"
    deleted: bool = True


class ChatChoice(Output, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    finish_reason: str
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
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kvrelay: Provenance | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(Output, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET
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


class Model(Output, frozen=True, kw_only=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["kvrelay"] = "kvrelay"


class ModelList(Output, frozen=True, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(Output, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Output, frozen=True, kw_only=True):
    prompt: str


class ErrorBody(Output, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Output, frozen=True, kw_only=True):
    error: ErrorBody
