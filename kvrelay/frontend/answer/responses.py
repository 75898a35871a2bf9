"""POST /v1/responses: text (and function calls) in, text (and function calls) out. What is stored: `prompt/stored.py`."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from kvrelay.errors import InvalidRequestError, RequestError
from kvrelay.frontend.answer.generation import Generation, Step
from kvrelay.frontend.answer.items import OutputItems
from kvrelay.frontend.answer.logprobs import chat_logprobs
from kvrelay.frontend.answer.loop import answer, delivery_of
from kvrelay.frontend.answer.reader import AnswerReader
from kvrelay.frontend.answer.types import Provenance, TokenLogprob
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import error_fields
from kvrelay.frontend.prompt.conversation import Conversation, prepare_conversation
from kvrelay.frontend.prompt.responses_input import chat_request, input_messages, output_messages, own_names
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.prompt.stored import StoredResponse, head_of, origin_after, previous_of, record_of
from kvrelay.frontend.prompt.types import ChatMessage
from kvrelay.frontend.service import Service
from kvrelay.states import FinishReason

_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseShown(TypedDict):
    """Repeats what the request asked for. `kvrelay` is there if it continues another."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: NotRequired[int | None]
    status: str
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]  # messages, reasoning and calls
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    kvrelay: NotRequired[Provenance]


async def responses(service: Service, call: Call) -> None:
    request = await service.read(call, _decoder)
    call.name("resp_", None)
    previous = await previous_of(service, call, request)
    history = [] if previous is None else previous.stored.messages
    try:
        wanted = chat_request(request, history)
        origin = None if previous is None else await origin_after(service, request, wanted, previous)
        conversation = await prepare_conversation(service, call, wanted, origin)
    except InvalidRequestError as error:
        raise own_names(error, request, history) from error
    shape = functools.partial(_Response, service, call, request, conversation, history)
    work = dataclasses.replace(conversation.work, is_stored=request.store is not False)
    await answer(service, call, work, delivery_of(request.stream), shape)


class _Response:
    """A `Shape`: one response in the making. Its events pile up in `_events` until the next `take` or `end`."""

    shows_kept = False

    def __init__(
        self,
        service: Service,
        call: Call,
        request: ResponsesRequest,
        conversation: Conversation,
        history: list[ChatMessage],
        generation: Generation,
    ) -> None:
        self._service = service
        self._request = request
        self._history = history
        self._conversation = conversation
        self._generation = generation
        self._streams = bool(request.stream)
        self._events: list[bytes] = []
        self._num_events = 0
        self._items = OutputItems(self._emit)
        self._reader = AnswerReader(conversation, generation.samples[0])
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self._response = _empty_response(service, call, request)
        self._emit("response.created", response=self._response)
        self._emit("response.in_progress", response=self._response)
        if self._streams:
            call.error_event = self._error_event

    def take(self, step: Step) -> bytes:
        self._logprobs += chat_logprobs(self._service.tokenizer, step, self._conversation.num_top_logprobs)
        deltas = self._reader.push(step.text, last=step.finish is not None)
        if deltas:
            self._items.add(deltas, self._logprobs)
            self._logprobs = []
        return self._pending()

    def end(self) -> bytes:
        cut = self._reader.sample.finish is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        self._items.finish(status)
        response = self._response
        response["status"], response["output"], response["usage"] = status, self._items.items, self._usage()
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["completed_at"] = None if cut else int(time.time())
        if not isinstance(origin := self._generation.provenance(), msgspec.UnsetType):
            self._response["kvrelay"] = origin
        if self._request.store is not False:
            self._store()
        self._emit(f"response.{status}", response=self._response)
        return self._pending() if self._streams else _encode(self._response)

    def _store(self) -> None:
        messages = [*self._history, *input_messages(self._request), *output_messages(self._items.items)]
        stored = StoredResponse(body=_encode(self._response), messages=messages, head=head_of(self._request))
        self._service.backend.continuations.store(self._reader.sample.parent, record_of(stored))

    def _usage(self) -> ResponseUsage:
        generation = self._generation
        return {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {"cached_tokens": sum(generation.cached_tokens), "cache_write_tokens": 0},
            "output_tokens": generation.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": generation.prompt_tokens + generation.output_tokens,
        }

    def _emit(self, name: str, /, **fields: Any) -> None:
        """Encodes at once: what the fields hold may grow on."""
        if self._streams:
            body = {"type": name, "sequence_number": self._num_events, **fields}
            self._num_events += 1
            self._events.append(b"event: " + name.encode() + b"\ndata: " + _encode(body) + b"\n\n")

    def _pending(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events

    def _error_event(self, error: RequestError) -> bytes:
        """OpenAI's `error` event. The official SDK raises APIError because of its field `error`."""
        self._emit("error", message=error.message, code=error.code, param=error.param, error=error_fields(error))
        return self._pending()


def _empty_response(service: Service, call: Call, request: ResponsesRequest) -> ResponseShown:
    """The response before its output, repeating what was requested."""
    wanted = None if request.text is None else request.text.format
    return {
        "id": call.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": service.answer_name(request.model),
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None} if request.reasoning is None else msgspec.to_builtins(request.reasoning),
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"} if wanted is None else msgspec.to_builtins(wanted)},
        "tool_choice": "auto" if request.tool_choice is None else msgspec.to_builtins(request.tool_choice),
        "tools": [] if request.tools is None else msgspec.to_builtins(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
