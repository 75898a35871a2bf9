"""What the first rank of a tensor-parallel worker tells the others. Rank 0 has the scheduler; the others only compute.

    rank 0                                  rank
      | RankSetup -------------------------> |      which share of the model to load
      | <---------------- Loaded | RankFailed |
      | KVMemory (on a CPU with a descriptor) |      where the worker's KV is
      | ------------------------------------> |
      | <-- Loaded | KVShare | RankFailed     |      a card's rank has its share on its card, and tells where
      | AdapterShare -----------------------> |      of a LoRA adapter, whenever one is read
      | Pass, Pass, ... --------------------> |      one per forward pass; its inputs follow in shared memory or by NCCL
      | Replay, ... ------------------------> |      on cards, instead of a Pass that is captured

The end of the connection is the end of the other side. KVMemory may come again, and replaces what was before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.config import ModelOptions
from kvrelay.wire.codec import Decoder


class RankMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages between ranks."""


class RankSetup(RankMessage, frozen=True, kw_only=True):
    rank: int
    num_ranks: int
    folder: str
    model: ModelOptions
    dtype: str
    num_threads: int
    max_positions: int  # 0: all that the model has
    log_level: str
    store_port: int = 0  # where ranks find each other that do not meet in shared memory
    num_cards: int = 0  # that the worker sees, on cards; rank r has card r modulo this

    @property
    def card(self) -> int:
        return self.rank % self.num_cards

    @property
    def one_card(self) -> bool:
        """Whether ranks share one."""
        return self.num_cards < self.num_ranks


class KVMemory(RankMessage, frozen=True, kw_only=True):
    """Of all ranks; a share is as large as the others."""

    num_blocks: int
    block_size: int


class KVShare(RankMessage, frozen=True, kw_only=True):
    """On the rank's card: the allocation's handle, and the share's offset in it."""

    handle: bytes
    offset: int


class Loaded(RankMessage, frozen=True, kw_only=True):
    """The rank has done what it was told."""


class RankFailed(RankMessage, frozen=True, kw_only=True):
    reason: str


class AdapterPart(msgspec.Struct, frozen=True, kw_only=True):
    """A `kernels.base.LoraPart`."""

    layer: int
    linear: Literal["qkv", "output", "gate_up", "down"]
    first: int
    rank: int  # of the adapter's product
    a: bytes
    b: bytes


class AdapterShare(RankMessage, frozen=True, kw_only=True):
    """A rank's share of a LoRA adapter."""

    number: int  # that passes know it by
    num_layers: int
    parts: list[AdapterPart]


class LoraPass(msgspec.Struct, frozen=True, kw_only=True):
    """As `kernels.base.LoraBatch`: begin, end and the adapter's number."""

    tokens: list[tuple[int, int, int]]
    outputs: list[tuple[int, int, int]]


class ImagesShape(msgspec.Struct, frozen=True, kw_only=True):
    """Of `kernels.base.ImageBatch`."""

    num_places: int
    width: int
    num_deepstack: int


class Pass(RankMessage, frozen=True, kw_only=True):
    """A forward pass: the shape of a `kernels.base.ForwardBatch`. Its tensors follow where ranks meet (`Ranks.spread`), except
    for the tokens, of which rank 0 spreads the embeddings."""

    num_tokens: int
    num_rows: int
    num_blocks: int  # of a row of the block tables
    num_logits: int
    max_query: int
    max_context: int  # if all rows decode, rounded up to whole blocks, so that messages of such steps stay equal
    lengths: list[tuple[int, int]] | None
    longest_end: int | None  # `max_context` of ForwardBatch.ends, if there is one
    images: ImagesShape | None = None
    lora: LoraPass | None = None
    bulk: tuple[tuple[int, int], ...] = ()  # of ForwardBatch
    dropped: list[int] = []  # adapters that no request has any more
    name: str = ""  # under which it is captured as well


class Replay(RankMessage, frozen=True, kw_only=True):
    """The captured pass of that name once more."""

    name: str


ToRank = RankSetup | KVMemory | AdapterShare | Pass | Replay
FromRank = Loaded | KVShare | RankFailed

read_from_rank: Decoder[FromRank] = Decoder(FromRank)
read_for_rank: Decoder[ToRank] = Decoder(ToRank)
