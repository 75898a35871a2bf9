"""POST /v1/responses: text (and function calls) in, text (and function calls) out. Nothing is stored."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError, RequestError
from kvrelay.frontend.answer.generation import Generation, Step
from kvrelay.frontend.answer.items import OutputItems
from kvrelay.frontend.answer.logprobs import chat_logprob
from kvrelay.frontend.answer.types import TokenLogprob
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.reading import BodyReader
from kvrelay.frontend.prompt.conversation import Answer, Conversation, prepare_conversation
from kvrelay.frontend.prompt.responses_input import chat_request, own_names
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.service import Service
from kvrelay.states import FinishReason

_read = BodyReader(ResponsesRequest)
_encode = msgspec.json.Encoder().encode


async def responses(service: Service, call: Call) -> None:
    request = await _read(service, call)
    call.name("resp_", None)
    try:
        conversation = await prepare_conversation(service, call, chat_request(request))
    except InvalidRequestError as error:
        raise own_names(error, request) from error
    generation = Generation(service, call, conversation.work, trace=call.trace())
    try:
        run = _Run(service, call, request, conversation, generation)
        await (run.stream() if request.stream else run.whole())
    finally:
        generation.close()


class _Run:
    """One response in the making. Events pile up in `_events` until they are sent; without a stream they are dropped."""

    def __init__(
        self, service: Service, call: Call, request: ResponsesRequest, conversation: Conversation, generation: Generation
    ) -> None:
        self._service = service
        self._call = call
        self._conversation = conversation
        self._generation = generation
        self._events: list[bytes] = []
        self._num_events = 0
        self._items = OutputItems(self._emit)
        self._answer: Answer = conversation.new_answer(generation.samples[0])
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self._response = _empty_response(service, call, request)

    async def whole(self) -> None:
        while steps := await self._generation.next():
            self._take(steps)
            self._events.clear()
        self._finish()
        await self._call.answer_json(self._response, self._generation.headers())

    async def stream(self) -> None:
        call, generation = self._call, self._generation
        steps = await generation.next()  # what fails before the first token gets its status
        await call.start_stream(generation.headers())
        self._emit("response.created", response=self._response)
        self._emit("response.in_progress", response=self._response)
        try:
            while not generation.done:
                self._take(steps)
                await call.write(self._pending())
                steps = await generation.next()
        except RequestError as error:
            await call.end_stream(self._error_event(error))
            return
        self._take(steps)
        self._finish()
        await call.end_stream(self._pending())

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            num_top = self._conversation.num_top_logprobs
            if num_top is not None and step.token is not None and step.logprobs is not None:
                self._logprobs.append(chat_logprob(self._service.tokenizer, step.token, step.logprobs, num_top))
            deltas = self._answer.push(step.text, last=step.finish is not None)
            if deltas:
                self._items.add(deltas, self._logprobs)
                self._logprobs = []

    def _finish(self) -> None:
        cut = self._generation.samples[0].finish is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        self._items.finish(status)
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": self._items.items,
            "usage": self._usage(),
        }
        self._emit(f"response.{status}", response=self._response)

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {"cached_tokens": sum(generation.cached_tokens), "cache_write_tokens": 0},
            "output_tokens": generation.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_tokens},
            "total_tokens": generation.prompt_tokens + generation.output_tokens,
        }

    def _emit(self, name: str, /, **fields: Any) -> None:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._events.append(b"event: " + name.encode() + b"\ndata: " + _encode(body) + b"\n\n")

    def _pending(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events

    def _error_event(self, error: RequestError) -> bytes:
        """OpenAI's `error` event. The official SDK raises APIError because of its field `error`."""
        told = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
        self._emit("error", message=error.message, code=error.code, param=error.param, error=told)
        return self._pending()


def _empty_response(service: Service, call: Call, request: ResponsesRequest) -> dict[str, Any]:
    """The response before its output, repeating what was asked for."""
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
        "model": service.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
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
