"""The OpenAPI 3.1 description, made from the structs that read requests and write answers."""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec

from kvrelay.frontend.answer.messages import MessageAnswer, TokenCount
from kvrelay.frontend.answer.responses import ResponseShown
from kvrelay.frontend.answer.types import ChatCompletion, Completion
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import JSON_TYPE, MESSAGES_PATHS, ErrorResponse, MessageError
from kvrelay.frontend.pages.admin import DrainRequest, LoadAdapterRequest, RoleRequest, UnloadAdapterRequest
from kvrelay.frontend.pages.continuations import ContinuationDeleted, ContinuationHandle, ContinuationList
from kvrelay.frontend.pages.info import Health, Model, ModelList, Versions
from kvrelay.frontend.pages.responses import ResponseDeleted
from kvrelay.frontend.pages.timelines import TimelineList
from kvrelay.frontend.pages.tokenize import Detokenized, Tokenized, TokenizerInfo
from kvrelay.frontend.prompt.messages_types import CountTokensRequest, MessagesRequest
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.prompt.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvrelay.frontend.service import Service
from kvrelay.router.backend import AdapterChange, DrainOrder
from kvrelay.router.shown import ClusterShown
from kvrelay.version import version

_JSON = "application/json"
_ONE = "/v1/continuations/{id}"
_RESPONSE = "/v1/responses/{id}"
_GENERATE = (400, 401, 404, 409, 413, 429, 500, 503, 504)
_READ = (400, 401, 404, 413, 500)
_ADMIN = (400, 401, 403, 404, 409, 413, 500, 503)
ERRORS = {
    400: "A field is wrong; `param` names it",
    401: "No API key, or a wrong one",
    403: "An operator's order, which needs an admin key",
    404: "No such path, model, worker, response or continuation",
    409: "The worker is already draining, or already has that role; or the request to continue from is still running",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "A bug in the server",
    503: "No worker is ready",
    504: "The request took longer than its time limit",
}
_PATH_NAME = re.compile(r"\{(\w+)\}")


class _Operation(msgspec.Struct, frozen=True):
    method: str
    path: str
    summary: str
    errors: tuple[int, ...]
    answer: type | None = None  # None: text
    body: type | None = None
    streams: bool = False
    content_type: str = _JSON


_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "Answer a conversation", _GENERATE, ChatCompletion, ChatRequest, True),
    _Operation("post", "/v1/completions", "Continue prompts", _GENERATE, Completion, CompletionRequest, True),
    _Operation(
        "post", "/v1/responses", "Answer, in the form of the Responses API", _GENERATE, ResponseShown, ResponsesRequest, True
    ),
    _Operation(
        "post", "/v1/messages", "Answer, in the form of Anthropic's API", _GENERATE, MessageAnswer, MessagesRequest, True
    ),
    _Operation("post", "/v1/messages/count_tokens", "Tokens of a prompt", _READ, TokenCount, CountTokensRequest),
    _Operation("post", "/tokenize", "Text or a conversation to token ids", _READ, Tokenized, TokenizeRequest),
    _Operation("post", "/detokenize", "Token ids to text", _READ, Detokenized, DetokenizeRequest),
    _Operation("get", "/tokenizer_info", "The tokenizer's configuration", (401,), TokenizerInfo),
    _Operation("post", "/admin/drain", "Let a worker finish and leave", _ADMIN, DrainOrder, DrainRequest),
    _Operation("post", "/admin/role", "Let a worker finish and come back in another role", _ADMIN, DrainOrder, RoleRequest),
    _Operation("post", "/v1/load_lora_adapter", "Load a LoRA adapter", _ADMIN, AdapterChange, LoadAdapterRequest),
    _Operation("post", "/v1/unload_lora_adapter", "Unload a LoRA adapter", _ADMIN, AdapterChange, UnloadAdapterRequest),
    _Operation("get", "/v1/continuations", "The caller's requests whose KV is kept", (401,), ContinuationList),
    _Operation("get", _ONE, "One request that can be continued from", (400, 401, 404), ContinuationHandle),
    _Operation("delete", _ONE, "Give up what is kept of a request", (401, 404), ContinuationDeleted),
    _Operation("get", _RESPONSE, "One stored response", (400, 401, 404), ResponseShown),
    _Operation("delete", _RESPONSE, "Forget a stored response", (401, 404), ResponseDeleted),
    _Operation("get", "/v1/models", "The model that is served", (401,), ModelList),
    _Operation("get", "/v1/models/{model}", "One model", (401, 404), Model),
    _Operation("get", "/health", "Whether requests can be served", (503,), Health),
    _Operation("get", "/cluster", "Workers, their load and their KV blocks", (401,), ClusterShown),
    _Operation("get", "/requests", "The last requests, with the stages of each", (400, 401), TimelineList),
    _Operation("get", "/requests/{id}", "The stages of one request", (401, 404), TimelineList),
    _Operation("get", "/metrics", "Prometheus metrics", (), content_type="text/plain"),
    _Operation("get", "/version", "Versions", (401,), Versions),
    _Operation("get", "/feed", "What the dashboard shows, as events", (401, 503), content_type="text/event-stream"),
)


async def openapi_page(service: Service, call: Call) -> None:
    await call.answer(200, _openapi_body(service.options.root_path), [JSON_TYPE])


@functools.cache
def _openapi_body(root_path: str) -> bytes:
    return msgspec.json.encode(openapi(root_path))


def openapi(root_path: str = "") -> dict[str, Any]:
    used = {each: None for operation in _OPERATIONS for each in (operation.body, operation.answer) if each is not None}
    bodies: list[type] = [ErrorResponse, MessageError, *used]
    references, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(bodies, references, strict=True))
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version(), "description": "Language models behind OpenAI's API."},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"apiKey": []}],
    }


def _described(operation: _Operation, schemas: dict[type, dict[str, Any]]) -> dict[str, Any]:
    schema = {"type": "string"} if operation.answer is None else schemas[operation.answer]
    content = {operation.content_type: {"schema": schema}}
    about = operation.summary if operation.body is None else "The answer"
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
        about = "The answer; events if `stream` is true"
    failed = {_JSON: {"schema": schemas[MessageError if operation.path in MESSAGES_PATHS else ErrorResponse]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": about, "content": content},
            **{str(status): {"description": ERRORS[status], "content": failed} for status in operation.errors},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[operation.body]}}}
    if names := _PATH_NAME.findall(operation.path):
        text = {"type": "string", "minLength": 1}
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    return described
