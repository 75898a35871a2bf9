"""Hostile bytes, the same for the same seed: mutations of valid messages, bombs, and what never was a message.

hostile_messages(rng, valid)   endless: lists of frames, as a ZMQ socket sends them
hostile_openings(rng)          endless: what a TCP connection to a ZMQ port may begin with
hostile_requests(rng)          endless: what a TCP connection to an HTTP port may carry
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

# ZMTP 3.1: signature, version, mechanism, as-server, filler; then READY with the socket's type
GREETING = b"\xff" + b"\0" * 7 + b"\x01\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + b"\0" * 31
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"

_ID = re.compile(rb"(?:cmpl|xfer)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:-[0-9a-f]{8})?")
_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.5,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    "x",
    "\0" * 30,
    "x" * 5000,
    "\ud7ff" * 9,
    b"",
    b"\xff" * 40,
    [],
    [[]],
    [0] * 500,
    [-1, 2**40],
    {},
    {"type": "Submit"},
    {"a": {"b": {"c": [1, 2, {"d": None}]}}},
    "xfer-00000000-0000-0000-0000-000000000000",
    "cmpl-00000000-0000-0000-0000-000000000000-00000000",
    "tcp://127.0.0.1:1",
    "tcp://[::1]:99999",
    "tcp://*:*",
    "ipc:///proc/self/mem",
    "tcp://" + "a" * 400 + ":1",
]
_BOMBS = [
    b"\x91" * 100_000,  # lists in lists
    b"\x81\xa1a" * 50_000,  # maps in maps
    b"\x81" * 100_000,  # maps as keys of maps
    b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xffabc",
    b"\xc6\xff\xff\xff\xffabc",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 100_000,
    b"\xc1",
    b"",
    b"\0",
    b"\xd9\x04\xff\xfe\xfd\xfc",  # no UTF-8
]


def hostile_messages(rng: random.Random, valid: Sequence[bytes]) -> Iterator[list[bytes]]:
    """What a socket of ours may be sent by somebody who speaks ZMQ. Some of it happens to be valid."""
    while True:
        frame = _mutated(rng, _renewed(rng, rng.choice(valid)), valid)
        draw = rng.random()
        if draw < 0.9:
            yield [frame]
        elif draw < 0.95:
            yield [frame, rng.choice(valid)]
        elif draw < 0.98:
            yield [b"", frame]
        else:
            yield [rng.randbytes(rng.randint(0, 9)) for _ in range(rng.randint(2, 40))]


def _renewed(rng: random.Random, frame: bytes) -> bytes:
    """Often about another request or transfer: most of what is said about a known one is refused at once."""
    if rng.random() < 0.3:
        return frame
    return _ID.sub(lambda found: found[0][:-8] + b"%08x" % rng.getrandbits(32), frame)


def _mutated(rng: random.Random, frame: bytes, valid: Sequence[bytes]) -> bytes:
    match rng.randrange(12):
        case 0:
            return frame[: rng.randint(0, len(frame))]
        case 1:
            return frame + rng.randbytes(rng.randint(1, 60))
        case 2:
            return rng.randbytes(rng.randint(0, 300))
        case 3:
            other = rng.choice(valid)
            return frame[: rng.randint(0, len(frame))] + other[rng.randint(0, len(other)) :]
        case 4 if rng.random() < 0.2:
            return rng.choice(_BOMBS)
        case 4 | 5 | 6:
            return _flipped(rng, frame)
        case _:
            return _reshaped(rng, frame)


def _flipped(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _reshaped(rng: random.Random, frame: bytes) -> bytes:
    """Still msgpack, but a field is missing, strange, or not asked for."""
    try:
        message = msgspec.msgpack.decode(frame)
    except msgspec.DecodeError:
        message = None
    if not isinstance(message, dict):
        return msgspec.msgpack.encode(rng.choice(_VALUES))
    target: Any = message
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        inner = [
            value
            for value in (target.values() if isinstance(target, dict) else target)
            if value and type(value) in (dict, list)
        ]
        if not inner:
            break
        target = rng.choice(inner)
    place: Any = rng.choice(list(target)) if isinstance(target, dict) else rng.randrange(len(target)) if target else None
    draw = rng.random()
    if place is None or (draw < 0.1 and isinstance(target, dict)):
        if isinstance(target, dict):
            target[rng.choice(("surplus", "type", "", "id"))] = rng.choice(_VALUES)
    elif draw < 0.25:
        del target[place]
    else:
        target[place] = rng.choice(_VALUES)
    return msgspec.msgpack.encode(message)


def hostile_openings(rng: random.Random) -> Iterator[bytes]:
    """What somebody may say who does not speak ZMQ, or not to the end."""
    while True:
        match rng.randrange(9):
            case 0:
                yield rng.randbytes(rng.randint(0, 200))
            case 1:
                yield GREETING[: rng.randint(0, len(GREETING))]
            case 2:
                yield _flipped(rng, GREETING)
            case 3:
                yield GREETING + READY[: rng.randint(0, len(READY))]
            case 4:
                yield GREETING + _flipped(rng, READY)
            case 5:  # a frame of any length, up to 2**64 - 1
                yield GREETING + READY + b"\x02" + rng.randbytes(8) + rng.randbytes(20)
            case 6:  # frames without end
                yield GREETING + READY + b"\x01\x01x" * rng.randint(1, 2000)
            case 7:
                yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * rng.randint(1, 3)
            case _:
                yield GREETING + READY + _flipped(rng, b"\x00\x05hello\x04\x04\x04PING\x00\x00") + rng.randbytes(9)


_METHODS = [b"GET", b"POST", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"BREW", b"\xff", b""]
_PATHS = [
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/v1/responses",
    b"/tokenize",
    b"/cluster",
    b"/metrics",
    b"/admin/drain",
    b"/%00",
    b"/../../etc/passwd",
    b"/" + b"a" * 3000,
    b"*",
    b"http://other/v1",
    b"/v1/completions?a=\xff\xfe",
    b"",
]
_HEADERS = [
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Expect: 100-continue",
    b"Host: a\r\nHost: b",
    b"X: " + b"y" * 2000,
    b": empty",
    b"no colon at all",
    b" folded",
    b"X-\xff\xfe: \x00\x01",
    b"Authorization: Bearer \xff\xfe\xfd",
    b"Content-Type: \xc3\x28",
    b"x-request-id: " + b"\x7f" * 50,
    b"x-session-id: " + b"s" * 3000,
    b"timeout: nan",
]


def hostile_requests(rng: random.Random) -> Iterator[bytes]:
    kinds: list[Callable[[random.Random], bytes]] = [
        _bad_line,
        _bad_body,
        _bad_body,
        _bad_body,
        _bad_headers,
        _bad_chunks,
        _noise,
    ]
    while True:
        yield rng.choice(kinds)(rng)


def _bad_line(rng: random.Random) -> bytes:
    version = rng.choice((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"HTTP/1.1 extra", b"http/1.1", b"", b"HTTP/2.0"))
    return rng.choice(_METHODS) + b" " + rng.choice(_PATHS) + b" " + version + b"\r\nHost: x\r\n\r\n"


def _bad_headers(rng: random.Random) -> bytes:
    headers = b"".join(rng.choice(_HEADERS) + b"\r\n" for _ in range(rng.choice((1, 2, 5, 60))))
    return (
        b"POST " + rng.choice(_PATHS[:5]) + b" HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + rng.randbytes(rng.randint(0, 20))
    )


def _bad_body(rng: random.Random) -> bytes:
    """A well-formed request with a body that is not."""
    body = _flipped(rng, _json(rng)) if rng.random() < 0.3 else _json(rng)
    if rng.random() < 0.2:
        body = body[: rng.randint(0, len(body))]
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (rng.choice(_PATHS[:4]), len(body)) + body


def _json(rng: random.Random) -> bytes:
    match rng.randrange(8):
        case 0:
            return b"[" * 50_000
        case 1:
            return b'{"a":' * 20_000
        case 2:
            return b'{"prompt": "' + rng.randbytes(30) + b'"}'
        case 3:
            return b'{"prompt": "\\ud800 x", "max_tokens": 1}'
        case 4:
            return b'{"prompt": "x", "max_tokens": ' + b"9" * rng.choice((20, 400, 5000)) + b"}"
        case _:
            body: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "temperature": 0}
            names = [
                "prompt",
                "max_tokens",
                "n",
                "seed",
                "stop",
                "logit_bias",
                "stream",
                "messages",
                "input",
                "logprobs",
                "surplus",
            ]
            for name in rng.sample(names, rng.randint(1, 3)):
                body[name] = rng.choice([value for value in _VALUES if not isinstance(value, bytes)])
            body["max_tokens"] = body["max_tokens"] if body["max_tokens"] in (None, -1, "", "x") else 1
            return json.dumps(body).encode(errors="replace")


def _bad_chunks(rng: random.Random) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    sizes = [
        b"5\r\nhello\r\n",
        b"-1\r\n",
        b"ffffffffffffffff\r\nx",
        b"fffffffffffffffff\r\n",
        b"0\r\n",
        b"5;" + b"e" * 500 + b"\r\nhello\r\n",
    ]
    sizes += [
        b"1\r\nx" * 50,
        b"zz\r\n",
        b"\r\n",
        b"0\r\nTrailer: " + b"t" * 500 + b"\r\n\r\n",
        b"1\r\n{\r\n" * 100 + b"0\r\n\r\n",
    ]
    return head + b"".join(rng.choice(sizes) for _ in range(rng.randint(1, 4)))


def _noise(rng: random.Random) -> bytes:
    return rng.choice((rng.randbytes(rng.randint(1, 200)), b"\r\n" * rng.randint(1, 50), GREETING, b"\x16\x03\x01\x02\x00\x01"))
