"""The signal plane: how a producer (prefill) and a consumer (decode) agree on a hand-over. The consumer's DEALER talks to the
producer's ROUTER; the DEALER's identity is the consumer's WorkerId. Bytes never travel here.

Opening, once per pair:

    consumer                                producer
      | Hello(version, worker, fingerprint) -> |
      | <------------------ Welcome | Refused  |
      | MapRegion(layout, engine infos) -----> |     each side tells the other where its KV memory is
      | <-------- RegionMapped(layout, engine) |     and which transport the pair uses

Write mode, for each transfer (both were given its TransferId by the router):

      | <---------------------------- Starting |     the first chunk is being computed
      | Reserve(blocks, skip_tokens) --------> |     or later, when there is room; Unreserve takes it back, answered
      | <-- (bytes) or Computed(tokens, layers)|     producer writes, or announces what the consumer may copy
      | <------------- WriteDone(first_tokens) |     every byte was written, or is there to be copied
      | ReadDone ----------------------------> |     only where the consumer copies: the producer's blocks are free

Read mode:

      | <------ Ready(blocks, first_tokens)    |     the prompt is computed
      | Pull --------------------------------> |     the consumer has room; answered Ready or NotReady
      | (bytes)                                |
      | ReadDone ----------------------------> |

Any time: Release (consumer no longer wants it), Abort answered by AbortAck (after which the sender of the ack touches nothing
of the other's), Heartbeat (extends leases, lists open transfers) answered by HeartbeatAck with the state of each.
"""

from __future__ import annotations

import msgspec

from kvrelay.ids import TransferId, WorkerId
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.wire.serving import FirstToken


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
    """To an opening that cannot work, and to a frame that is no message. The connection stays."""

    reason: str


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

    blocks: list[int]
    skip_tokens: int


class Unreserve(TransferMessage, frozen=True, kw_only=True):
    pass


class Pull(TransferMessage, frozen=True, kw_only=True):
    skip_tokens: int


class ReadDone(TransferMessage, frozen=True, kw_only=True):
    pass


class Release(TransferMessage, frozen=True, kw_only=True):
    """The consumer does not need this transfer (it ended at its first token, say)."""


class Heartbeat(Message, frozen=True, kw_only=True):
    number: int
    transfers: list[tuple[TransferId, ConsumerState]]


# Producer -> consumer


class Starting(TransferMessage, frozen=True, kw_only=True):
    num_tokens: int  # of the prompt


class Unreserved(TransferMessage, frozen=True, kw_only=True):
    """The answer to Unreserve: the producer will not write into the blocks of any earlier Reserve."""


class Computed(TransferMessage, frozen=True, kw_only=True):
    """Where the consumer copies: tokens [0, num_tokens) are there in all layers, and those up to `next_tokens` in the first
    `layers` layers. `blocks` are the producer's, for the prompt from its first token."""

    blocks: list[int]
    num_tokens: int
    next_tokens: int
    layers: int


class WriteDone(TransferMessage, frozen=True, kw_only=True):
    first_tokens: list[FirstToken]
    blocks: list[int] = []  # the producer's, where the consumer copies


class Ready(TransferMessage, frozen=True, kw_only=True):
    blocks: list[int]
    num_tokens: int
    first_tokens: list[FirstToken]


class NotReady(TransferMessage, frozen=True, kw_only=True):
    pass


class HeartbeatAck(Message, frozen=True, kw_only=True):
    number: int
    transfers: list[tuple[TransferId, ProducerState]]


# Either way


class Abort(TransferMessage, frozen=True, kw_only=True):
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
