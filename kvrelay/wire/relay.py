"""What every relay channel says, whatever it moves: how a producer and a consumer open their connection, tell each other that
they live, and end a transfer. The consumer's DEALER talks to the producer's ROUTER; the DEALER's identity is the consumer's
WorkerId. Bytes never travel here. What is special to KV stands in `wire/kv.py`, to embeddings in `wire/embedding.py`.

Opening, once per pair:

    consumer                                producer
      | Hello(version, worker, fingerprint) -> |
      | <------------------ Welcome | Refused  |
      | Map(layout, engine infos) -----------> |     each side tells the other where its memory is
      | <-------------- Mapped(layout, engine) |     and which transport the pair uses; or Refused

Any time: Abort, answered by AbortAck; Heartbeat (extends readers' leases, lists open transfers and those whose end the producer
has not confirmed), answered by HeartbeatAck with the state of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import msgspec

from kvrelay.ids import TransferId, WorkerId, as_transfer_id, as_worker_id
from kvrelay.wire.codec import Decoder

L = TypeVar("L")  # the shape of a worker's memory
S = TypeVar("S")  # the state of a transfer, on the side that tells it


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a worker's region through one transport; `info` is that transport's own."""

    name: str
    info: bytes


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages of a relay channel."""


class TransferMessage(Message, frozen=True, kw_only=True):
    """Concerns one transfer. Matched on (transfer_id, the peer it came from)."""

    transfer_id: TransferId


# Opening


class Hello(Message, frozen=True, kw_only=True):
    version: int
    worker_id: WorkerId
    fingerprint: str  # model and dtype; the layout comes with Map


class Welcome(Message, frozen=True, kw_only=True):
    version: int
    worker_id: WorkerId


class Refused(Message, frozen=True, kw_only=True):
    """The connection stays; it is `about` an opening that cannot work, a sender that has not opened its connection or was
    forgotten (it may say hello again), or one frame that is no message."""

    reason: str
    about: Literal["opening", "sender", "frame"]


class Map(Message, Generic[L], frozen=True, kw_only=True):
    layout: L
    host: str  # equal on two workers that share memory
    engines: list[EngineInfo]


class Mapped(Message, Generic[L], frozen=True, kw_only=True):
    layout: L
    engine: EngineInfo  # the one that the pair uses


# Heartbeats


class Heartbeat(Message, Generic[S], frozen=True, kw_only=True):
    """Extends the reader's lease of every transfer it lists. One that is over says again what its last message said."""

    number: int
    transfers: list[tuple[TransferId, S]]


class HeartbeatAck(Message, Generic[S], frozen=True, kw_only=True):
    """The producer's state of every transfer that the heartbeat listed; none for those it does not know."""

    number: int
    transfers: list[tuple[TransferId, S | None]]


# Either way


class Abort(TransferMessage, frozen=True, kw_only=True):
    """Ends the transfer. A producer sends it only when its own moves have drained, so to a consumer it is as good as an ack."""

    reason: str


class AbortAck(TransferMessage, frozen=True, kw_only=True):
    """The sender has drained: it will neither read nor write anything of this transfer any more."""


FromConsumer = Hello | Abort | AbortAck  # besides Map and Heartbeat, which know what they map
FromProducer = Welcome | Refused | Abort | AbortAck  # besides Mapped and HeartbeatAck


def reader(messages: Any) -> Callable[[bytes], Any]:
    """Decodes the messages of one channel in one direction, given as a union. What it returns raises ProtocolError, also where
    an id is of the wrong kind."""
    decoder: Decoder[Message] = Decoder(messages)

    def decode(frame: bytes) -> Message:
        message = decoder.decode(frame)
        match message:
            case TransferMessage():
                as_transfer_id(message.transfer_id)
            case Hello() | Welcome():
                as_worker_id(message.worker_id)
            case Heartbeat() | HeartbeatAck():
                for transfer_id, _ in message.transfers:
                    as_transfer_id(transfer_id)
        return message

    return decode
