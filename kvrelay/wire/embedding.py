"""The signal plane of embeddings: how an encode worker (the producer) and whoever computes the prompt (the consumer) agree on
the way of an embedding whose length only the producer knows. Sockets and identities are as on the KV's signal plane
(`wire/transfer.py`), with which this one shares nothing but a few structs. Bytes never travel here.

Opening, once per pair:

    consumer                                     producer
      | Hello(version, worker, fingerprint) ------> |
      | <----------------------- Welcome | Refused  |
      | MapPool(layout, engine infos) ------------> |     each side tells the other where its pool of blocks is
      | <---------------- PoolMapped(layout, engine)|     and which transport the pair uses; or Refused

For each embedding (both were given its TransferId by the router):

      | Init(allocated_tokens, blocks) -----------> |     the default; the length is not known here
      | <-- (bytes)                                 |     as many tokens as fit; where the consumer copies, after the notice
      | <---- Partial(sent_tokens, total_tokens) or Done(total_tokens)
      | Resume(sent_tokens, allocated_tokens, blocks)->|  after a Partial: what came was moved out, here is room for more
      | ...                                         |     as often as needed
      | <---------------------- Done(total_tokens)  |
      | Received ---------------------------------> |     the consumer has everything and reads no more

Any time: Abort, answered by AbortAck once nothing is written any more; Failed, the producer's own end, answered by AbortAck
once nothing is read any more; Heartbeat (extends leases; lists open transfers, and ended ones until their end is confirmed),
answered by HeartbeatAck with the state of each.

`sent_tokens` numbers the rounds of a transfer: Init asks for the tokens from 0 on, a Resume for those from `sent_tokens` on,
and a notice says how far they came. So whatever comes twice or late is told from what is new. The parts of an embedding have
nothing to do with the chunks in which a prompt is computed.
"""

from __future__ import annotations

import msgspec

from kvrelay.ids import TransferId, as_transfer_id, as_worker_id
from kvrelay.states import EmbeddingState
from kvrelay.wire.codec import Decoder
from kvrelay.wire.transfer import Abort, AbortAck, EngineInfo, Hello, Message, Refused, TransferMessage, Welcome

EMBEDDING_VERSION = 1  # of this plane alone


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a worker's pool: four planes, one after the other.

    rows [blocks, block_size, hidden * (1 + deepstack)], fill ids [blocks, block_size], positions [blocks, block_size, 3] and
    aux data [blocks, aux_items], of which the first block of an embedding holds what there is.
    """

    num_blocks: int
    block_size: int
    hidden: int
    deepstack: int  # further rows of `hidden` items that come with a token
    dtype: str  # of the rows, such as "bfloat16"
    item_bytes: int
    aux_items: int


# Opening


class MapPool(Message, frozen=True, kw_only=True):
    layout: PoolLayout
    host: str  # equal on two workers that share memory
    engines: list[EngineInfo]


class PoolMapped(Message, frozen=True, kw_only=True):
    layout: PoolLayout
    engine: EngineInfo  # the one that the pair uses


# Consumer -> producer


class Init(TransferMessage, frozen=True, kw_only=True):
    """Room for the first `allocated_tokens` tokens. The last of the blocks may be used in part: there are
    ceil(allocated_tokens / block_size) of them. `required_dst_info_num` destinations must say so before anything is sent."""

    block_size: int
    allocated_tokens: int
    blocks: list[int]
    required_dst_info_num: int


class Resume(TransferMessage, frozen=True, kw_only=True):
    """Room for the `allocated_tokens` tokens from `sent_tokens` on; all before them are in safety."""

    sent_tokens: int
    block_size: int
    allocated_tokens: int
    blocks: list[int]
    required_dst_info_num: int


class Received(TransferMessage, frozen=True, kw_only=True):
    """The consumer has the whole embedding: it will not read the producer's blocks again."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Extends the lease of every transfer it lists. SUCCESS and FAILED say again what a Received or an Abort said."""

    number: int
    transfers: list[tuple[TransferId, EmbeddingState]]


# Producer -> consumer


class Partial(TransferMessage, frozen=True, kw_only=True):
    """The room is full: tokens up to `sent_tokens` of `total_tokens` were written, or (with `blocks`) can be copied."""

    sent_tokens: int
    total_tokens: int
    blocks: list[int] = []  # the producer's, from the first token on, where the consumer copies


class Done(TransferMessage, frozen=True, kw_only=True):
    """All of the rest was written, or (with `blocks`) is there to be copied."""

    total_tokens: int
    blocks: list[int] = []


class Failed(TransferMessage, frozen=True, kw_only=True):
    """It is over. The producer writes nothing of it any more; a consumer that copies lets go and says AbortAck."""

    reason: str


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """The producer's state of every transfer that the heartbeat listed; none for those it does not know."""

    number: int
    transfers: list[tuple[TransferId, EmbeddingState | None]]


ToProducer = Hello | MapPool | Init | Resume | Received | Heartbeat | Abort | AbortAck
ToConsumer = Welcome | Refused | PoolMapped | Partial | Done | Failed | HeartbeatAck | AbortAck

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
