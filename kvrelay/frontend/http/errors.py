"""Errors as OpenAI's clients expect them.

Before the answer has begun: the status, and `{"error": {"message", "type", "param", "code"}}`. Once a stream has begun, the
status is sent: one event `data: {"error": {...}}` ends the stream without `[DONE]`. The official SDK raises APIError on it.
Under `/v1/messages` they are as Anthropic's clients expect them: `{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvrelay.errors import InvalidRequestError, MethodNotAllowedError, NotFoundError, QueueFullError, RequestError

JSON_TYPE = (b"content-type", b"application/json")


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorBody


class MessageErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class MessageError(msgspec.Struct, frozen=True, kw_only=True):
    """As Anthropic's clients expect it."""

    error: MessageErrorBody
    type: Literal["error"] = "error"


MESSAGES_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_MESSAGE_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ClientGoneError(Exception):
    """The client closed the connection: there is no one left to answer."""


def error_fields(error: RequestError) -> ErrorBody:
    return ErrorBody(message=error.message, type=error.kind, param=error.param, code=error.code)


def error_body(error: RequestError) -> bytes:
    return msgspec.json.encode(ErrorResponse(error=error_fields(error)))


def error_event(error: RequestError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def message_error_body(error: RequestError) -> bytes:
    kind = _MESSAGE_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = MessageErrorBody(type=kind, message=error.message)
    return msgspec.json.encode(MessageError(error=body))


def message_error_event(error: RequestError) -> bytes:
    return b"event: error\ndata: " + message_error_body(error) + b"\n\n"


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    headers = [JSON_TYPE]
    if isinstance(error, QueueFullError):
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    elif error.status == 503:
        headers.append((b"retry-after", b"1"))
    elif error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif error.status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    return headers


def unknown_path(path: str) -> NotFoundError:
    return NotFoundError(f"unknown path: {path[:200]}", code="unknown_url")


def wrong_method(method: str, path: str, allowed: str) -> MethodNotAllowedError:
    return MethodNotAllowedError(f"{path} accepts {allowed}, not {method}", code="method_not_allowed")


def missing(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"missing field: {field}", param=field, code="missing_required_parameter")


def too_short(field: str, value: str | list[Any]) -> InvalidRequestError:
    """For an empty text or list where one item is the least."""
    kind = "string" if isinstance(value, str) else "array"
    return InvalidRequestError(f"{field} is empty", param=field, code=f"{kind}_below_min_length")


def refuse(fields: Mapping[str, object], reason: str) -> None:
    """Raises for the first of these fields that the client has set."""
    for field, value in fields.items():
        if value is not None:
            raise InvalidRequestError(f"{field} {reason}", param=field)


# msgspec's errors in our words. Its messages end in " - at `$.path`".
_PLACE = re.compile(r" - at (?:`key` in )?`\$(.*?)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)
_REFUSED = re.compile(r"^Expected `null`, got ")
_WRONG_VALUE = re.compile(r"^Invalid (?:enum )?value ")

_LIMIT = re.compile(r"^Expected `(int|float|str|array|object)` (of length )?([<>]=?) ")
_PATTERN = re.compile(r"^Expected `str` matching regex ")
_KINDS = {"int": "integer", "float": "decimal", "str": "string", "array": "array", "object": "object"}


def invalid_body(error: Exception) -> InvalidRequestError:
    """The 400 for a body that msgspec could not read."""
    if not isinstance(error, msgspec.ValidationError):
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return InvalidRequestError(f"the body is not valid JSON: {reason}", code="invalid_json")
    text = str(error)
    place = _PLACE.search(text)
    path = "" if place is None else place.group(1).removeprefix(".").replace("[...]", "")
    rule = text if place is None else text[: place.start()]
    if (unknown := _UNKNOWN.match(rule)) is not None:
        field = _join(path, unknown.group(1)[:200])
        return InvalidRequestError(f"unknown field: {field}", param=field, code="unknown_parameter")
    if (absent := _MISSING.match(rule)) is not None:
        return missing(_join(path, absent.group(1)))
    if _REFUSED.match(rule):
        return InvalidRequestError(f"{path} is not supported", param=path or None, code="unsupported_parameter")
    code = "invalid_value" if _WRONG_VALUE.match(rule) else _range_code(rule) or "invalid_type"
    return InvalidRequestError(f"{path or 'the body'}: {rule[:300]}", param=path or None, code=code)


def _range_code(rule: str) -> str | None:
    """OpenAI's code for a value of the right type outside its limits; None for one of another type."""
    limited = _LIMIT.match(rule)
    if limited is None:
        return "invalid_value" if _PATTERN.match(rule) else None
    kind, measure, sign = limited.groups()
    side = "above_max" if sign.startswith("<") else "below_min"
    return f"{_KINDS[kind]}_{side}_{'length' if measure else 'value'}"


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
