"""The tie between a worker or router and the process that launched it: a socket pair that it inherits (worker/launcher.py).

worker, router                           launcher
  | Ready -------------------------------> |   of a router: it can use as many workers as it was told to wait for
  | Becomes(role) -----------------------> |   I start again in this role: my process stays, and so does this tie
  | Ends(reason) ------------------------> |   I cannot go on
  | <-------------------- Crashed(outcome) |   to routers: a worker of the launcher's crashed
  | <------------------- AtRegistry(what)  |   to routers: what the launcher's registry refused
  | <--------------------- (end of file)   |   the launcher is gone: end

One JSON object a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvrelay.states import Role

CrashOutcome = Literal["restarted", "given_up"]  # what becomes of a worker that crashed


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages of this channel."""


class Becomes(Message, frozen=True, kw_only=True):
    """A worker that replaces this one begins in this role."""

    role: Role


class Ready(Message, frozen=True, kw_only=True):
    """Clients can be told that it serves."""


class Ends(Message, frozen=True, kw_only=True):
    reason: str


class Crashed(Message, frozen=True, kw_only=True):
    outcome: CrashOutcome


class AtRegistry(Message, frozen=True, kw_only=True):
    what: Literal["malformed message", "refused peer"]


ToLauncher = Becomes | Ready | Ends
ToRouter = Crashed | AtRegistry

_decoder: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)
_router_decoder: msgspec.json.Decoder[ToRouter] = msgspec.json.Decoder(ToRouter)
decode_told = _router_decoder.decode


def encode_line(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_lines(data: bytes) -> list[ToLauncher]:
    """What is no message, such as a last line cut short, is left out."""
    messages: list[ToLauncher] = []
    for line in data.splitlines():
        try:
            messages.append(_decoder.decode(line))
        except msgspec.DecodeError:
            continue
    return messages


def with_role(arguments: Sequence[str], role: Role) -> list[str]:
    """A worker's command line, in another role."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--role":
            next(words, None)
        elif not word.startswith("--role="):
            kept.append(word)
    return [*kept, f"--role={role.value}"]
