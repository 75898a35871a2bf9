"""What the first rank of a tensor-parallel worker tells the others. Rank 0 has the scheduler; the others only compute.

    rank 0                                  rank
      | RankSetup -------------------------> |      which share of the model to load
      | <---------------- Loaded | RankFailed |
      | KVMemory (and its descriptor) ------> |      where the worker's KV is
      | <------------------------- Loaded     |
      | AdapterShare -----------------------> |      of a LoRA adapter, whenever one is read
      | Pass, Pass, ... --------------------> |      one per forward pass; the two then meet in memory that they share

The end of the connection is the end of the other side.
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
    store_port: int = 0  # where ranks find each other that have no native code to meet in shared memory


class KVMemory(RankMessage, frozen=True, kw_only=True):
    """Of all ranks; a share is as large as the others."""

    num_blocks: int
    block_size: int


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


class ImagePass(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors as bytes, as `kernels.base.ImageBatch` has them."""

    axes: bytes
    places: bytes
    features: bytes
    num_deepstack: int


class Pass(RankMessage, frozen=True, kw_only=True):
    """A forward pass: what `kernels.base.ForwardBatch` has, except for the tokens. Their embeddings are spread by rank 0."""

    num_tokens: int
    positions: bytes
    slots: bytes
    query_start: bytes
    context_lens: bytes
    block_tables: bytes
    max_query: int
    max_context: int
    lengths: list[tuple[int, int]] | None
    logit_rows: bytes
    images: ImagePass | None = None
    lora: LoraPass | None = None
    dropped: list[int] = []  # adapters that no request has any more


ToRank = RankSetup | KVMemory | AdapterShare | Pass
FromRank = Loaded | RankFailed

read_from_rank: Decoder[FromRank] = Decoder(FromRank)
read_for_rank: Decoder[ToRank] = Decoder(ToRank)
