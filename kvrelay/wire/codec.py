"""Bytes to messages and back. A frame that is not exactly one message of its channel raises ProtocolError."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvrelay.errors import ProtocolError

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Reads the messages of one channel, given as a union of tagged structs."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)

    def decode(self, frame: bytes) -> M:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"malformed message of {len(frame)} bytes: {error}") from error
