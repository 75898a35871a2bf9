"""Identities. Each is its own type, made in one place and checked wherever it crosses a border.

- `RequestId`  names a request inside one worker: "cmpl-{uuid}-{suffix}". The suffix is random, so the same client request
  has a different id on every worker it visits.
- `TransferId` names one attempt to move a request's KV between two workers: "xfer-{uuid}". The router makes it.
- `WorkerId`   names one incarnation of a worker process: "{role}-{random}". A restarted process has a new one.
- `RouterId`   names one incarnation of a router process: "router-{random}".
- A trace id   names what a client follows through several services: 32 hexadecimal digits of its W3C `traceparent` header, or
  made here. It is carried along and written into log lines; nothing is looked up by it.
- `KeptId`    names the kept KV of one finished sample: "kv-{uuid}". The router makes it; a client may name it.

The id a client sees or chose (`external_id`) is plain text and is never used as any of these.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from typing import NewType

from kvrelay.errors import WrongIdError

RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)
WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)
KeptId = NewType("KeptId", str)

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_FORMS = {
    "RequestId": re.compile(rf"cmpl-{_UUID}-[0-9a-f]{{8}}"),
    "TransferId": re.compile(rf"xfer-{_UUID}"),
    "WorkerId": re.compile(r"(?:whole|prefill|decode|encode)-[0-9a-f]{12}"),
    "RouterId": re.compile(r"router-[0-9a-f]{12}"),
    "KeptId": re.compile(rf"kv-{_UUID}"),
}
_ANSWER_ID = re.compile(r"(?:cmpl-|chatcmpl-|resp_|msg_)[0-9a-f]{32}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


def new_request_id() -> RequestId:
    digits = os.urandom(20).hex()
    return RequestId(f"cmpl-{_uuid(digits[8:])}-{digits[:8]}")


def new_transfer_id() -> TransferId:
    return TransferId(f"xfer-{_uuid(os.urandom(16).hex())}")


def new_worker_id(role: str) -> WorkerId:
    return as_worker_id(f"{role}-{secrets.token_hex(6)}")


def new_kept_id() -> KeptId:
    return KeptId(f"kv-{_uuid(os.urandom(16).hex())}")


def new_router_id() -> RouterId:
    return RouterId(f"router-{secrets.token_hex(6)}")


def number_of(router_id: RouterId) -> int:
    """A number that hardly another router has."""
    return int(router_id.rpartition("-")[2], 16)


def new_answer_id(prefix: str) -> str:
    """What a client calls its request if it has no name for it: the id of our answer, such as chatcmpl-..."""
    return f"{prefix}{secrets.token_hex(16)}"


def trace_from(headers: Mapping[str, str], *, sampled: bool = False) -> dict[str, str]:
    """The trace headers for those that work on a request: its trace goes on with a new parent, which is us. One that has none,
    or none that can be read, gets a trace of its own; `sampled` says whether that is to be recorded."""
    known = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    made = secrets.token_hex(24)  # a span id, and a trace id where there is none
    trace_id, flags = (known[1], known[3]) if known else (made[16:], "01" if sampled else "00")
    trace = {"traceparent": f"00-{trace_id}-{made[:16]}-{flags}"}
    return trace | {"tracestate": headers["tracestate"]} if known and "tracestate" in headers else trace


def read_trace(headers: Mapping[str, str]) -> tuple[str, str, bool]:
    """Trace id, span id of the parent, and whether the trace is recorded; empty if there is none."""
    known = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return (known[1], known[2], bool(int(known[3], 16) & 1)) if known else ("", "", False)


def trace_id_of(headers: Mapping[str, str]) -> str:
    """Empty if there is none."""
    return read_trace(headers)[0]


def _uuid(digits: str) -> str:
    """Of random digits (version 4). Several are made for each request, and Python's own take four times longer."""
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{'89ab'[ord(digits[16]) % 4]}{digits[17:20]}-{digits[20:]}"


def is_answer_id(external_id: str) -> bool:
    """Whether the id of a request is one that we made up (`new_answer_id`), or looks like one."""
    return _ANSWER_ID.fullmatch(external_id) is not None or _FORMS["RequestId"].fullmatch(external_id) is not None


def as_request_id(text: str) -> RequestId:
    return RequestId(_checked(text, "RequestId"))


def as_transfer_id(text: str) -> TransferId:
    return TransferId(_checked(text, "TransferId"))


def as_worker_id(text: str) -> WorkerId:
    return WorkerId(_checked(text, "WorkerId"))


def as_router_id(text: str) -> RouterId:
    return RouterId(_checked(text, "RouterId"))


def as_kept_id(text: str) -> KeptId:
    return KeptId(_checked(text, "KeptId"))


def _checked(text: str, kind: str) -> str:
    if _FORMS[kind].fullmatch(text):
        return text
    looks_like = next((name for name, form in _FORMS.items() if form.fullmatch(text)), "no id of ours")
    raise WrongIdError(f"expected a {kind}, got {text[:80]!r}, which is {looks_like}")
