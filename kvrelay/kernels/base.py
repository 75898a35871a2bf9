"""The seam between models and arithmetic. A model is written against `Kernels`; an implementation is chosen per device.

- `torch_kernels.py`   plain PyTorch: the reference, on every device
- `native/`            C for CPUs, compiled on first use; falls back to the reference where there is no compiler
- `cuda/`              Triton, cuBLAS and cuDNN for NVIDIA cards

All implementations pass one contract test against the reference. Tensors are float32 or bfloat16 on one device; rows are
tokens. Nothing here allocates per-request state.

KV memory is one tensor [layers, 2, blocks, block_size, kv_heads, head_dim]; a layer's slice `kv` is [2, blocks, block_size,
kv_heads, head_dim]. The slot of a token is block * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kvrelay.kernels.ranks import Ranks


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How one attention layer splits its projections. A fused qkv row is [q heads | k heads | v heads] x head_dim."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class AttentionBatch:
    """Which tokens attend to which. Row i of the batch has the queries query_start[i] .. query_start[i + 1], the last of
    which sees context_lens[i] tokens (itself included), found through block_tables[i]."""

    query_start: torch.Tensor  # [rows + 1] int32
    context_lens: torch.Tensor  # [rows] int32
    block_tables: torch.Tensor  # [rows, max_blocks] int32; entries past the context mean nothing and are never read
    max_query: int
    max_context: int
    lengths: tuple[tuple[int, int], ...] | None = None  # (queries, context) of each row, where the host knows them

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]


@dataclass(slots=True)
class ImageBatch:
    """What a pass has besides if some of its tokens are an image's."""

    axes: torch.Tensor  # [3, tokens] int64: the positions of all tokens of the pass in time, height and width
    places: torch.Tensor  # [image tokens] int64: which tokens of the pass they are
    features: torch.Tensor  # [image tokens, (1 + num_deepstack) * hidden], in the model's dtype
    num_deepstack: int

    def embeddings(self) -> torch.Tensor:
        """Instead of the tokens' own."""
        return self.features[:, : self._width]

    def deepstack(self, layer: int) -> torch.Tensor:
        """What is added to the tokens behind that layer, one of the first `num_deepstack`."""
        return self.features[:, (1 + layer) * self._width : (2 + layer) * self._width]

    @property
    def _width(self) -> int:
        return self.features.shape[1] // (1 + self.num_deepstack)


LinearName = Literal["qkv", "output", "gate_up", "down"]
LINEARS: tuple[LinearName, ...] = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What an adapter adds to neighbouring outputs of a linear layer: x a^T b, from output `first` on."""

    first: int
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [rank, outputs], scaled

    @property
    def end(self) -> int:
        return self.first + self.b.shape[1]


LoraLayer = dict[LinearName, list[LoraPart]]  # what an adapter adds to the linear layers of one decoder layer


class PackedAdapter(Protocol):
    """A LoRA adapter's weights in the layout that its kernels like best."""

    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LoraSpan:
    """Neighbouring rows that have the same adapter."""

    begin: int
    end: int
    adapter: PackedAdapter


LoraSpans = tuple[LoraSpan, ...]


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which tokens of a pass have adapters, if any has. All others are the base model's."""

    tokens: LoraSpans
    outputs: LoraSpans  # the same of `logit_rows`


@dataclass(slots=True)
class ForwardBatch:
    """The inputs of one forward pass over `num_tokens` tokens of all rows, concatenated."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64: rows of the rotary table
    slots: torch.Tensor  # [tokens] int64, where each token's KV is stored
    attention: AttentionBatch
    logit_rows: torch.Tensor  # [outputs] int64: the tokens whose logits are wanted, and no others
    ends: AttentionBatch | None = None  # the last token as a row of one query, where only its logits are wanted
    images: ImageBatch | None = None  # None: no token is an image's
    lora: LoraBatch | None = None  # None: no token has an adapter
    bulk: tuple[tuple[int, int], ...] = ()  # runs of tokens that are the bulk of their prompts (`bulk_end`); in order
    name: str = ""  # of a pass that is captured: its tensors are the same ones each time


_BULK_TOKENS = 64


def bulk_end(num_prompt_tokens: int) -> int:
    """The bulk of a prompt is all but its last 64 to 127 tokens. Kernels may compute it in another way (`Kernels.has_bulk`),
    which is faster for many tokens and slower for few, and whose last bits differ. A token's place in its prompt alone decides
    in which way it is computed, so it has the same bits however the prompt is cut into passes. KV from the prefix cache or from
    a parent keeps the bits with which it was computed there, perhaps for a prompt of another length."""
    return max(0, num_prompt_tokens // _BULK_TOKENS - 1) * _BULK_TOKENS


@dataclass(frozen=True, slots=True)
class Quantised:
    """An [out, in] weight in the blocks of a GGUF file."""

    format: str  # as GGUF names it
    blocks: torch.Tensor  # [out, bytes] uint8
    in_features: int

    def rows(self, kept: slice) -> Quantised:
        return Quantised(self.format, self.blocks[kept], self.in_features)

    def columns(self, kept: slice) -> Quantised:
        """Of whole blocks."""
        width = self.blocks.shape[1]
        bytes_kept = slice(width * kept.start // self.in_features, width * kept.stop // self.in_features)
        return Quantised(self.format, self.blocks[:, bytes_kept], kept.stop - kept.start)

    def with_zeros(self, count: int) -> Quantised:
        """The same with zeros as its first columns, which are whole blocks: in every format, bytes of zero are zeros."""
        blocks = self.blocks.clone()
        blocks[:, : blocks.shape[1] * count // self.in_features] = 0
        return Quantised(self.format, blocks, self.in_features)


class Packed(Protocol):
    """A linear layer's weights in the layout that its kernels like best."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """All that a decoder layer is made of."""

    index: int  # among the model's layers
    shape: HeadShape
    input_norm: torch.Tensor
    qkv: Packed
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Packed
    post_norm: torch.Tensor
    gate_up: Packed
    down: Packed
    eps: float
    scale: float

    def linear(self, name: LinearName) -> Packed:
        match name:
            case "qkv":
                return self.qkv
            case "output":
                return self.output
            case "gate_up":
                return self.gate_up
            case "down":
                return self.down


class FusedLayer(Protocol):
    """A whole layer in one call. It gives what the single calls give: on a CPU to the bit, except for the bulk of prompts, on a
    card up to rounding."""

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        """`x` is what the layer before adds to the residual, None for the first. Returns what this one adds."""


class Kernels(Protocol):
    """The arithmetic of a decoder layer."""

    def fuse(self, weights: LayerWeights, ranks: Ranks) -> FusedLayer | None:
        """Where an implementation has it; None: the model makes the calls below one by one. Of several `ranks`, each has a
        share of the weights, and what `output` and `down` give is summed over them."""

    @property
    def has_bulk(self) -> bool:
        """Whether passes say which tokens are the bulk of their prompts: fused layers compute these in another way."""

    @property
    def quantised_formats(self) -> frozenset[str]:
        """In which `pack` takes weights and keeps them; the products are those of the dequantised weights."""

    def pack(self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None, scale: torch.Tensor | None = None) -> Packed:
        """Takes over a [out, in] weight. The caller drops its own reference, so weights exist once. `scale` [out] is that of
        a weight in fp8, for kernels of cards alone. A weight on torch's `meta` device has a shape and no contents: for kernels
        whose memory has them already."""

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out]."""

    def pack_adapter(self, layers: Sequence[LoraLayer]) -> PackedAdapter:
        """Takes over the weights of a LoRA adapter."""

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, spans: LoraSpans, layer: int, name: LinearName) -> None:
        """Adds to `out`, which is linear(x), what the adapters of its rows change of it."""

    def embed(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Rows of a packed [vocabulary, hidden] weight (the embedding, which a tied head shares)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; returns its norm."""

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        shape: HeadShape,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Splits qkv, applies the optional per-head norms, rotates q and k (half-split rotary; cos_sin [positions, head_dim]
        holds cos, then sin, of the first half's angles), stores k and v at the slots, returns q [tokens, heads, dim], which
        may be a view of qkv: what stood there is lost."""

    def attention(self, q: torch.Tensor, shape: HeadShape, batch: ForwardBatch, kv: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of q [tokens, heads, dim] over the paged context; returns [tokens, heads * dim]."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * width], gate then up -> silu(gate) * up [tokens, width]."""
