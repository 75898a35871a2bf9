"""The KV's relay channel: how a prefill worker (the producer) and a decode worker (the consumer) agree on a hand-over. Opening,
heartbeats and aborts are those of every relay channel (`wire/relay.py`).

Write mode, for each transfer (both were given its TransferId by the router):

    consumer                                producer
      | <---------------------------- Starting |     the first chunk is being computed
      | Reserve(blocks, skip_tokens) --------> |     or later, when there is room
      | <-- (bytes) or Computed(tokens, layers)|     producer writes, or announces what the consumer may copy
      | <------------- WriteDone(first_tokens) |     every byte was written, or is there to be copied
      | ReadDone ----------------------------> |     only where the consumer copies: the producer's blocks are free

Read mode:

      | <------------------------------- Ready |     the prompt is computed
      | Pull --------------------------------> |     the consumer has room; answered Ready(blocks) or NotReady
      | (bytes)                                |
      | ReadDone ----------------------------> |

Any time: Release (the consumer no longer wants it and holds no blocks for it).
"""

from __future__ import annotations

import msgspec

from kvrelay.states import ConsumerState, ProducerState
from kvrelay.wire.relay import FromConsumer, FromProducer, Heartbeat, HeartbeatAck, Map, Mapped, TransferMessage, reader
from kvrelay.wire.serving import FirstToken

KV_VERSION = 4  # of this channel alone
MAX_RANKS = 32  # of a worker


def heads_per_rank(num_kv_heads: int, tp: int) -> int:
    """As many for each rank, so that their shares of memory have one shape."""
    return -(-num_kv_heads // tp)


def heads_of(num_kv_heads: int, tp: int, rank: int) -> range:
    """The KV heads of one rank. Where they cannot be split evenly, neighbours have some of them twice; where there are more
    ranks than heads, several ranks in a row have the same one."""
    count = heads_per_rank(num_kv_heads, tp)
    first = min(rank * count, num_kv_heads - count) if tp <= num_kv_heads else rank * num_kv_heads // tp
    return range(first, first + count)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a worker's KV memory: [ranks, layers, planes, blocks, block_size, kv_heads of a rank, head_dim]."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int  # of the model
    head_dim: int
    dtype: str  # such as "float32"
    item_bytes: int
    tp: int = 1  # ranks of the worker
    planes: int = 2  # of a layer: K and V; 1 where a block holds both


# Consumer -> producer


class Reserve(TransferMessage, frozen=True, kw_only=True):
    """The consumer's blocks for the prompt's tokens from `skip_tokens` on (the earlier ones it has), or more of them."""

    blocks: list[int]
    skip_tokens: int


class Pull(TransferMessage, frozen=True, kw_only=True):
    """Read mode: the consumer has blocks for the tokens from `skip_tokens` on, and asks for the producer's."""

    skip_tokens: int


class ReadDone(TransferMessage, frozen=True, kw_only=True):
    """The consumer has copied everything: it will not read the producer's blocks again."""


class Release(TransferMessage, frozen=True, kw_only=True):
    """The consumer does not need this transfer (it ended at its first token, say) and holds no blocks for it."""


# Producer -> consumer


class Starting(TransferMessage, frozen=True, kw_only=True):
    num_tokens: int  # of the prompt


class Computed(TransferMessage, frozen=True, kw_only=True):
    """Where the consumer copies: tokens [0, num_tokens) are there in all layers, and those up to `next_tokens` in the first
    `layers` layers. `blocks` are the producer's, for the prompt from its first token."""

    blocks: list[int]
    num_tokens: int
    next_tokens: int
    layers: int


class WriteDone(TransferMessage, frozen=True, kw_only=True):
    """Everything that was reserved for was written, or (with `blocks`) is there to be copied."""

    first_tokens: list[FirstToken]
    blocks: list[int] = []  # the producer's, where the consumer copies


class Ready(TransferMessage, frozen=True, kw_only=True):
    """The prompt is computed. With blocks it answers a Pull, and they are held for the consumer to read; without it only
    announces."""

    num_tokens: int
    blocks: list[int] = []
    first_tokens: list[FirstToken] = []


class NotReady(TransferMessage, frozen=True, kw_only=True):
    """The answer to a Pull that came too early: ask again later."""


ToProducer = FromConsumer | Map[Layout] | Heartbeat[ConsumerState] | Reserve | Pull | ReadDone | Release
ToConsumer = FromProducer | Mapped[Layout] | HeartbeatAck[ProducerState] | Starting | Computed | WriteDone | Ready | NotReady

decode_for_producer = reader(ToProducer)
decode_for_consumer = reader(ToConsumer)
