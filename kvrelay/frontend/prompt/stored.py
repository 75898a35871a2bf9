"""Stored responses: what is remembered of each, and how the next one continues from it.

A stored response is a parent (`router/parent.py`) with a record: its body, and the conversation up to its end. The next
response has that conversation before its input. If nothing that the prompt begins with has changed, it is a continuation: its
prompt is all tokens of the stored one, and what the chat template writes after an answer. Otherwise the conversation is
rendered anew.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvrelay.errors import InvalidRequestError, NotFoundError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt import types as chat
from kvrelay.frontend.prompt.continuation import parent_of
from kvrelay.frontend.prompt.images import has_images
from kvrelay.frontend.prompt.responses_input import input_messages
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.prompt.template import render
from kvrelay.frontend.prompt.work import Origin
from kvrelay.frontend.service import Service
from kvrelay.router.parent import Parent

_ANSWER = "\u2063answer\u2063"  # stands for an answer whose tokens are known


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    body: bytes  # JSON
    messages: list[chat.ChatMessage]  # the conversation and its answer, without instructions
    head: bytes  # digest of what comes before the conversation in a prompt


class Previous(msgspec.Struct, frozen=True, kw_only=True):
    """The response that a request names as the one before."""

    parent: Parent
    stored: StoredResponse


_decoder = msgspec.msgpack.Decoder(StoredResponse)


def record_of(response: StoredResponse) -> bytes:
    return msgspec.msgpack.encode(response)


def read_record(parent: Parent) -> StoredResponse | None:
    """None: it is not stored."""
    return _decoder.decode(parent.record) if parent.record else None


def head_of(request: ResponsesRequest) -> bytes:
    tools = None if request.tool_choice == "none" else request.tools
    head = msgspec.json.encode([request.instructions, tools, request.chat_template_kwargs])
    return hashlib.blake2b(head, digest_size=16).digest()


async def previous_of(service: Service, call: Call, request: ResponsesRequest) -> Previous | None:
    """Waits for one that is still being generated."""
    name = request.previous_response_id
    if name is None:
        return None
    try:
        parent = await parent_of(service, call, name, None)
        stored = read_record(parent)
    except NotFoundError:
        stored = None
    if stored is None:
        raise InvalidRequestError(
            f"previous_response_id: no response {name!r} is stored",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return Previous(parent=parent, stored=stored)


async def origin_after(
    service: Service, request: ResponsesRequest, wanted: chat.ChatRequest, previous: Previous
) -> Origin | None:
    """None: the prompt does not begin with the tokens of the previous response. `wanted` is the whole conversation."""
    tokens, added = list(previous.parent.tokens), input_messages(request)
    if previous.parent.adapter != service.adapter_of(request.model):  # KV of another adapter
        return None
    if previous.stored.head != head_of(request) or has_images(added):
        return None
    assert wanted.messages is not None
    before = wanted.messages[: -len(added) - 1]
    messages = [*before, chat.AssistantMessage(content=_ANSWER), *added]
    tools = [] if wanted.tool_choice == "none" else wanted.tools or []
    parts = (await render(service, wanted, messages, tools)).split(_ANSWER)
    if len(parts) != 2:  # the template leaves out what an assistant said before
        return None
    end = service.tokenizer.decode(tokens[-1:], skip_special_tokens=False)
    suffix = await service.encode_chat(parts[1].removeprefix(end))
    service.images.check_text(suffix, "input")
    assert request.previous_response_id is not None
    return Origin(request.previous_response_id, previous.parent, [*tokens, *suffix])
