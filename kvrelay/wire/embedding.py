"""The embeddings' relay channel: how an encode worker (the producer) and the worker that computes the prompt (the consumer)
agree on the way of an embedding whose length only the producer knows. Opening, heartbeats and aborts are those of every relay
channel (`wire/relay.py`).

For each embedding (both were given its TransferId by the router):

    consumer                                     producer
      | Init(allocated_tokens, blocks) -----------> |     the default; the length is not known here
      | <-- (bytes)                                 |     as many tokens as fit; where the consumer copies, after the notice
      | <---- Partial(sent_tokens, total_tokens) or Done(total_tokens)
      | Resume(sent_tokens, allocated_tokens, blocks)->|  after a Partial: what came was moved out, here is room for more
      | ...                                         |     as often as needed
      | <---------------------- Done(total_tokens)  |
      | Received ---------------------------------> |     the consumer has everything and reads no more

`sent_tokens` numbers the rounds of a transfer: Init asks for the tokens from 0 on, a Resume for those from `sent_tokens` on,
and a notice says how far they came. So what comes twice or late is told from what is new. The parts of an embedding have
nothing to do with the chunks in which a prompt is computed.
"""

from __future__ import annotations

import msgspec

from kvrelay.states import EmbeddingState
from kvrelay.wire.relay import FromConsumer, FromProducer, Heartbeat, HeartbeatAck, Map, Mapped, TransferMessage, reader

EMBEDDING_VERSION = 2  # of this channel alone


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


ToProducer = FromConsumer | Map[PoolLayout] | Heartbeat[EmbeddingState] | Init | Resume | Received
ToConsumer = FromProducer | Mapped[PoolLayout] | HeartbeatAck[EmbeddingState] | Partial | Done

decode_for_producer = reader(ToProducer)
decode_for_consumer = reader(ToConsumer)
