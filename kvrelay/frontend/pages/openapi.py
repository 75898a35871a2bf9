"""The OpenAPI 3.1 description, made from the very structs that read requests and write answers."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import msgspec

from kvrelay.frontend.answer.types import ChatCompletion, Completion
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import JSON_TYPE, ErrorResponse
from kvrelay.frontend.pages.admin import DrainRequest, RoleRequest
from kvrelay.frontend.pages.continuations import ContinuationDeleted, ContinuationHandle, ContinuationList
from kvrelay.frontend.pages.info import Model, ModelList
from kvrelay.frontend.pages.tokenize import Detokenized, Tokenized
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.prompt.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvrelay.frontend.service import Service
from kvrelay.router.backend import DrainOrder
from kvrelay.version import version

_JSON = "application/json"
_REFERENCE = "#/components/schemas/{name}"
_GENERATE_ERRORS = (400, 401, 404, 409, 413, 429, 500, 503, 504)
_READ_ERRORS = (400, 401, 404, 413, 500)
_ADMIN_ERRORS = (400, 401, 404, 409, 413, 500, 503)
_ERRORS = {
    400: "A field is wrong; `param` names it",
    401: "No API key, or a wrong one",
    404: "No such path, model, worker or continuation",
    409: "The worker is draining, or has that role, already; or what is to be continued is still being generated",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "Our fault",
    503: "No worker is ready",
    504: "It took longer than it was given",
}
_HTML = (b"content-type", b"text/html; charset=utf-8")
_OBJECT: dict[str, Any] = {"type": "object"}
_PATH_NAME = re.compile(r"\{(\w+)\}")

# path, summary, request body, response body, streams
_POSTS: tuple[tuple[str, str, type, type | None, bool], ...] = (
    ("/v1/chat/completions", "Answer a conversation", ChatRequest, ChatCompletion, True),
    ("/v1/completions", "Continue prompts", CompletionRequest, Completion, True),
    ("/v1/responses", "Answer, in the form of the Responses API", ResponsesRequest, None, True),
    ("/tokenize", "Text or a conversation to token ids", TokenizeRequest, Tokenized, False),
    ("/detokenize", "Token ids to text", DetokenizeRequest, Detokenized, False),
)
_ADMIN: tuple[tuple[str, str, type], ...] = (
    ("/admin/drain", "Let a worker finish and leave", DrainRequest),
    ("/admin/role", "Let a worker finish and come back in another role", RoleRequest),
)
# path, summary, content type, schema, errors
_GETS: tuple[tuple[str, str, str, type | None, tuple[int, ...]], ...] = (
    ("/v1/continuations", "The caller's requests whose KV is kept", _JSON, ContinuationList, (401,)),
    ("/v1/continuations/{id}", "One request that can be continued from", _JSON, ContinuationHandle, (400, 401, 404)),
    ("/v1/models", "The model that is served", _JSON, ModelList, (401,)),
    ("/v1/models/{model}", "One model", _JSON, Model, (401, 404)),
    ("/health", "Whether requests can be served", _JSON, None, (503,)),
    ("/cluster", "Workers, their load and their KV blocks", _JSON, None, (401,)),
    ("/metrics", "Prometheus metrics", "text/plain", None, ()),
    ("/version", "Versions", _JSON, None, (401,)),
)


_DELETES: tuple[tuple[str, str, type, tuple[int, ...]], ...] = (
    ("/v1/continuations/{id}", "Give up what is kept of a request", ContinuationDeleted, (401, 404)),
)


async def openapi_page(service: Service, call: Call) -> None:
    await call.answer(200, _openapi_body(), [JSON_TYPE])


@functools.cache
def _openapi_body() -> bytes:
    return msgspec.json.encode(openapi())


async def docs(service: Service, call: Call) -> None:
    await call.answer(200, _docs_body(), [_HTML])


@functools.cache
def _docs_body() -> bytes:
    return (pathlib.Path(__file__).parent / "docs.html").read_bytes()


def openapi() -> dict[str, Any]:
    bodies: list[type] = [ErrorResponse, ModelList, Model, DrainOrder, *(request for _, _, request in _ADMIN)]
    bodies += [ContinuationList, ContinuationHandle, ContinuationDeleted]
    for _, _, request, response, _ in _POSTS:
        bodies += [request] if response is None else [request, response]
    references, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    by_type = dict(zip(bodies, references, strict=True))
    paths: dict[str, Any] = {}
    for path, summary, request, response, streams in _POSTS:
        answers = _errors(_GENERATE_ERRORS if streams else _READ_ERRORS, by_type)
        paths[path] = {"post": _post(summary, by_type[request], _schema(by_type, response), answers, streams)}
    for path, summary, request in _ADMIN:
        paths[path] = {"post": _post(summary, by_type[request], by_type[DrainOrder], _errors(_ADMIN_ERRORS, by_type), False)}
    for path, summary, content_type, response, errors in _GETS:
        paths[path] = {"get": _get(path, summary, content_type, _schema(by_type, response), errors, by_type)}
    for path, summary, response, errors in _DELETES:
        paths[path]["delete"] = _get(path, summary, _JSON, by_type[response], errors, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version(), "description": "Language models behind OpenAI's API."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"apiKey": []}],
    }


def _schema(by_type: dict[type, dict[str, Any]], body: type | None) -> dict[str, Any]:
    return _OBJECT if body is None else by_type[body]


def _post(
    summary: str, request: dict[str, Any], response: dict[str, Any], errors: dict[str, Any], streams: bool
) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": response}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers = {
        "200": {"description": "The answer; events if `stream` is true" if streams else "The answer", "content": content}
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {_JSON: {"schema": request}}},
        "responses": answers | errors,
    }


def _get(
    path: str,
    summary: str,
    content_type: str,
    schema: dict[str, Any],
    errors: tuple[int, ...],
    by_type: dict[type, dict[str, Any]],
) -> dict[str, Any]:
    shown = {"type": "string"} if content_type != _JSON else schema
    answer = {"200": {"description": summary, "content": {content_type: {"schema": shown}}}}
    operation: dict[str, Any] = {"summary": summary, "responses": answer | _errors(errors, by_type)}
    names = _PATH_NAME.findall(path)
    if names:
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    return operation


def _errors(statuses: tuple[int, ...], by_type: dict[type, dict[str, Any]]) -> dict[str, Any]:
    content = {_JSON: {"schema": by_type[ErrorResponse]}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}
