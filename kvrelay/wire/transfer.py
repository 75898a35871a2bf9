"""The signal plane: how a producer (prefill) and a consumer (decode) agree on a hand-over. The consumer's DEALER talks to the
producer's ROUTER; the DEALER's identity is the consumer's WorkerId. Bytes never travel here.

Opening, once per pair:

    consumer                                producer
      | Hello(version, worker, fingerprint) -> |
      | <------------------ Welcome | Refused  |
      | MapRegion(layout, engine infos) -----> |     each side tells the other where its KV memory is
      | <-------- RegionMapped(layout, engine) |     and which transport the pair uses; or Refused

Write mode, for each transfer (both were given its TransferId by the router):

      | <---------------------------- Starting |     the first chunk is being computed
      | Reserve(blocks, skip_tokens) --------> |     or later, when there is room; Unreserve takes it back, answered Unreserved
      | <-- (bytes) or Computed(tokens, layers)|     producer writes, or announces what the consumer may copy
      | <------------- WriteDone(first_tokens) |     every byte was written, or is there to be copied
      | ReadDone ----------------------------> |     only where the consumer copies: the producer's blocks are free

Read mode:

      | <------ Ready(blocks, first_tokens)    |     the prompt is computed
      | Pull --------------------------------> |     the consumer has room; answered Ready or NotReady
      | (bytes)                                |
      | ReadDone ----------------------------> |

Any time: Release (consumer no longer wants it and holds no blocks for it), Abort answered by AbortAck, Heartbeat (extends
leases, lists open transfers and those whose end the producer has not confirmed) answered by HeartbeatAck with the state of
each.

`reservation` numbers a consumer's attempts to give blocks to one transfer, from 1. What answers a reservation repeats its
number, so an answer to one that was taken back is told from an answer to the present one. 0 is no reservation.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.ids import TransferId, WorkerId, as_transfer_id, as_worker_id
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.wire.codec import Decoder
from kvrelay.wire.serving import FirstToken

SIGNAL_VERSION = 1  # of this plane alone: it has not changed while the others went on


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a worker's KV memory: [layers, 2, blocks, block_size, kv_heads, head_dim]."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # such as "float32"
    item_bytes: int
    tp: int = 1


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a worker's region through one transport; `info` is that transport's own."""

    name: str
    info: bytes


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages of this channel."""


class TransferMessage(Message, frozen=True, kw_only=True):
    """Concerns one transfer. Matched on (transfer_id, the peer it came from)."""

    transfer_id: TransferId


# Opening


class Hello(Message, frozen=True, kw_only=True):
    version: int
    worker_id: WorkerId
    fingerprint: str  # model and dtype; the layout comes with MapRegion


class Welcome(Message, frozen=True, kw_only=True):
    version: int
    worker_id: WorkerId


class Refused(Message, frozen=True, kw_only=True):
    """The connection stays; it is `about` an opening that cannot work, a sender that has not opened its connection or was
    forgotten (it may say hello again), or one frame that is no message."""

    reason: str
    about: Literal["opening", "sender", "frame"]


class MapRegion(Message, frozen=True, kw_only=True):
    layout: Layout
    host: str  # equal on two workers that share memory
    engines: list[EngineInfo]


class RegionMapped(Message, frozen=True, kw_only=True):
    layout: Layout
    engine: EngineInfo  # the one that the pair uses


# Consumer -> producer


class Reserve(TransferMessage, frozen=True, kw_only=True):
    """The consumer's blocks for the prompt's tokens from `skip_tokens` on (the earlier ones it has)."""

    reservation: int
    blocks: list[int]
    skip_tokens: int


class Unreserve(TransferMessage, frozen=True, kw_only=True):
    """Takes a reservation, and every earlier one, back."""

    reservation: int


class Pull(TransferMessage, frozen=True, kw_only=True):
    """Read mode: the consumer has blocks for the tokens from `skip_tokens` on, and asks for the producer's."""

    reservation: int
    skip_tokens: int


class ReadDone(TransferMessage, frozen=True, kw_only=True):
    """The consumer has copied everything: it will not read the producer's blocks again."""


class Release(TransferMessage, frozen=True, kw_only=True):
    """The consumer does not need this transfer (it ended at its first token, say) and holds no blocks for it."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Extends the lease of every transfer it lists. DONE and FAILED say again what a ReadDone, Release or Abort said."""

    number: int
    transfers: list[tuple[TransferId, ConsumerState]]


# Producer -> consumer


class Starting(TransferMessage, frozen=True, kw_only=True):
    num_tokens: int  # of the prompt


class Unreserved(TransferMessage, frozen=True, kw_only=True):
    """The answer to Unreserve: the producer will not write into the blocks of this reservation or an earlier one."""

    reservation: int


class Computed(TransferMessage, frozen=True, kw_only=True):
    """Where the consumer copies: tokens [0, num_tokens) are there in all layers, and those up to `next_tokens` in the first
    `layers` layers. `blocks` are the producer's, for the prompt from its first token."""

    reservation: int
    blocks: list[int]
    num_tokens: int
    next_tokens: int
    layers: int


class WriteDone(TransferMessage, frozen=True, kw_only=True):
    """Everything the reservation asked for was written, or (with `blocks`) is there to be copied."""

    reservation: int
    first_tokens: list[FirstToken]
    blocks: list[int] = []  # the producer's, where the consumer copies


class Ready(TransferMessage, frozen=True, kw_only=True):
    """The prompt is computed. With a reservation it answers that Pull, and the blocks are held for the consumer to read; with
    none it only announces."""

    reservation: int = 0
    blocks: list[int]
    num_tokens: int
    first_tokens: list[FirstToken]


class NotReady(TransferMessage, frozen=True, kw_only=True):
    """The answer to a Pull that came too early: ask again later."""

    reservation: int


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """The producer's state of every transfer that the heartbeat listed, UNKNOWN for those it never heard of."""

    number: int
    transfers: list[tuple[TransferId, ProducerState]]


# Either way


class Abort(TransferMessage, frozen=True, kw_only=True):
    """Ends the transfer. A producer sends it only when its own moves have drained, so to a consumer it is as good as an ack."""

    reason: str


class AbortAck(TransferMessage, frozen=True, kw_only=True):
    """The sender has drained: it will neither read nor write anything of this transfer any more."""


ToProducer = Hello | MapRegion | Reserve | Unreserve | Pull | ReadDone | Release | Heartbeat | Abort | AbortAck
ToConsumer = (
    Welcome
    | Refused
    | RegionMapped
    | Starting
    | Unreserved
    | Computed
    | WriteDone
    | Ready
    | NotReady
    | HeartbeatAck
    | Abort
    | AbortAck
)

_to_producer: Decoder[ToProducer] = Decoder(ToProducer)
_to_consumer: Decoder[ToConsumer] = Decoder(ToConsumer)


def decode_for_producer(frame: bytes) -> ToProducer:
    """Raises ProtocolError, also where an id is of the wrong kind."""
    message = _to_producer.decode(frame)
    _check_ids(message)
    return message


def decode_for_consumer(frame: bytes) -> ToConsumer:
    """Raises as `decode_for_producer`."""
    message = _to_consumer.decode(frame)
    _check_ids(message)
    return message


def _check_ids(message: Message) -> None:
    match message:
        case TransferMessage():
            as_transfer_id(message.transfer_id)
        case Hello() | Welcome():
            as_worker_id(message.worker_id)
        case Heartbeat() | HeartbeatAck():
            for transfer_id, _ in message.transfers:
                as_transfer_id(transfer_id)
