"""The decoder that Llama, SmolLM2, Mistral, Qwen2 and Qwen3 share; the spec says where they differ (biases, norms of heads,
rotation).

One forward pass: embed, then per layer

    x = norm(residual);  q, k, v = qkv(x);  rotate, store k and v;  residual += output(attention(q))
    x = norm(residual);  gate, up = gate_up(x);                     residual += down(silu(gate) * up)

then the final norm and the head. Only the tokens named in `logit_rows` leave the last attention: what follows it is
per-token, and no logits are asked for of the others.

What a LoRA adapter adds to a product is added to it at once, for the tokens that have the adapter; a rank has its
share of both.

A rank of a tensor-parallel model has some of the heads and some of the columns between gate and down, so what it adds to the
residual is one summand: the ranks add theirs up. Rank 0 has the embedding and the head besides.

Where a token is an image's, its features stand for the embedding, and for families that have more of them these are added
behind each of the first layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.kernels.base import ForwardBatch, HeadShape, ImageBatch, Kernels, LayerWeights, LinearName, LoraSpans, Packed
from kvrelay.kernels.ranks import ALONE, Ranks
from kvrelay.models.layers import WeightSource, axis_of_pairs, fused_linear, linear, rotary_rows, rotary_table, take_matrix


class DecoderLayer:
    """The weights of one layer and what is done with them."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, source: WeightSource, index: int, ranks: Ranks) -> None:
        self._kernels = kernels
        self._ranks = ranks
        name, hidden, inner = f"model.layers.{index}", spec.hidden_size, spec.intermediate_size
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        gate_up = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]

        def head_norm(part: str) -> torch.Tensor | None:
            """On each head's query or key before the rotation, for families that have it."""
            return source.take(f"{name}.self_attn.{part}_norm.weight", (spec.head_dim,)) if spec.qk_norm else None

        self._weights = LayerWeights(
            index=index,
            shape=HeadShape(num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim),
            input_norm=source.take(f"{name}.input_layernorm.weight", (hidden,)),
            qkv=fused_linear(kernels, source, projections, [q_size, kv_size, kv_size], hidden, bias=spec.attention_bias),
            q_norm=head_norm("q"),
            k_norm=head_norm("k"),
            output=linear(kernels, source, f"{name}.self_attn.o_proj", hidden, q_size, bias=spec.output_bias),
            post_norm=source.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
            gate_up=fused_linear(kernels, source, gate_up, [inner, inner], hidden, bias=spec.mlp_bias),
            down=linear(kernels, source, f"{name}.mlp.down_proj", hidden, inner, bias=spec.mlp_bias),
            eps=spec.rms_norm_eps,
            scale=spec.head_dim**-0.5,
        )
        self.fused = kernels.fuse(self._weights, ranks)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.input_norm.dtype

    def input_norm(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Of the residual, to which `x` is added; for the first layer there is nothing to add yet."""
        weights = self._weights
        if x is None:
            return self._kernels.rms_norm(residual, weights.input_norm, weights.eps)
        return self._kernels.add_rms_norm(x, residual, weights.input_norm, weights.eps)

    def query_and_store(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        """Stores the tokens' keys and values; returns their queries."""
        weights = self._weights
        qkv = self._linear(x, "qkv", () if batch.lora is None else batch.lora.tokens)
        return self._kernels.rope_and_store(qkv, weights.shape, cos_sin, batch, kv, weights.q_norm, weights.k_norm, weights.eps)

    def attend(self, query: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        return self._kernels.attention(query, self._weights.shape, batch, kv, self._weights.scale)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, lora: LoraSpans) -> torch.Tensor:
        """All that follows attention. Adds to the residual, except for the last product, which it returns."""
        weights, kernels = self._weights, self._kernels
        x = self._ranks.add_up(self._linear(attended, "output", lora))
        x = kernels.add_rms_norm(x, residual, weights.post_norm, weights.eps)
        return self._ranks.add_up(self._linear(kernels.silu_mul(self._linear(x, "gate_up", lora)), "down", lora))

    def _linear(self, x: torch.Tensor, name: LinearName, lora: LoraSpans) -> torch.Tensor:
        out = self._kernels.linear(x, self._weights.linear(name))
        if lora:
            self._kernels.add_lora(out, x, lora, self._weights.index, name)
        return out


class _Ends:
    """What is before the first layer and behind the last."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, source: WeightSource) -> None:
        self._kernels = kernels
        self._eps = spec.rms_norm_eps
        vocabulary = (spec.vocab_size, spec.hidden_size)
        self._embedding = kernels.pack(take_matrix(source, "model.embed_tokens.weight", vocabulary), None)
        self._norm = source.take("model.norm.weight", (spec.hidden_size,))
        self._head: Packed = self._embedding
        if not spec.tie_word_embeddings:
            self._head = kernels.pack(take_matrix(source, "lm_head.weight", vocabulary), None)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._kernels.embed(token_ids, self._embedding)

    def logits(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(self._kernels.add_rms_norm(x, residual, self._norm, self._eps), self._head)


def _attend_at_end(layer: DecoderLayer, query: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
    """Of the last layer, for the tokens whose logits are wanted."""
    if batch.ends is None:
        return layer.attend(query, batch, kv)[batch.logit_rows]
    return layer.attend(query[batch.logit_rows], dataclasses.replace(batch, attention=batch.ends), kv)


class LlamaModel:
    """A decoder-only model. Holds weights, constants and views of the KV pool, and no state of any request; `forward` may be
    called from one thread at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        source: WeightSource,
        *,
        device: torch.device,
        max_positions: int,
        ranks: Ranks = ALONE,
    ) -> None:
        """Spec and source are those of one rank of `ranks`."""
        self.spec = spec
        self._kernels = kernels
        self._ranks = ranks
        self._ends = _Ends(spec, kernels, source) if ranks.rank == 0 else None  # of the other ranks, rank 0's
        self._layers = [DecoderLayer(spec, kernels, source, index, ranks) for index in range(spec.num_layers)]
        self.dtype = self._layers[0].dtype
        self._kv: torch.Tensor | None = None
        self._kv_layers: tuple[torch.Tensor, ...] = ()
        self._cos_sin = rotary_table(spec.rope, spec.head_dim, max_positions, device)
        self._axis_of_pair = None if spec.rope.mrope_section is None else axis_of_pairs(spec.rope).to(device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: torch.Tensor, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """kv is [layers, 2, blocks, block_size, kv_heads, head_dim]; returns logits [len(logit_rows), vocabulary] in the
        model's dtype. `on_layer` is told of each layer whose KV is stored."""
        residual = self._embedded(batch)
        cos_sin, images = self._cos_sin, batch.images
        if images is not None:
            batch, cos_sin = self._with_own_rotation(batch, images)
        x: torch.Tensor | None = None
        last, is_split = len(self._layers) - 1, self._ranks.num_ranks > 1
        all_rows = batch.logit_rows.shape[0] == batch.token_ids.shape[0]  # decodes alone: nothing to leave out
        fused_last = all_rows and not batch.bulk  # the last layer is often done in steps, which know no bulk, so it has none
        for index, (layer, layer_kv) in enumerate(zip(self._layers, self._by_layer(kv), strict=True)):
            if images is not None and x is not None and index <= images.num_deepstack:
                x.index_add_(0, images.places, images.deepstack(index - 1))
            if layer.fused is not None and (index < last or fused_last):
                x = layer.fused(x, residual, cos_sin, batch, layer_kv)
                if on_layer is not None:
                    on_layer(index)
                continue
            x = layer.input_norm(x, residual)
            query = layer.query_and_store(x, cos_sin, batch, layer_kv)
            if index == last and batch.logit_rows.shape[0] == 0:
                self._ranks.meet()
                if on_layer is not None:
                    on_layer(index)
                return query.new_empty((0, self.spec.vocab_size))
            if on_layer is not None and not is_split:
                on_layer(index)
            lora = () if batch.lora is None else batch.lora.tokens
            if index < last or all_rows:
                attended = layer.attend(query, batch, layer_kv)
            else:
                attended, residual = _attend_at_end(layer, query, batch, layer_kv), residual[batch.logit_rows]
                lora = () if batch.lora is None else batch.lora.outputs
            x = layer.finish(attended, residual, lora)
            if on_layer is not None and is_split:
                on_layer(index)  # the other ranks have stored theirs, or there would be no sum
        assert x is not None
        return x[:0] if self._ends is None else self._ends.logits(x, residual)

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
        if self._ends is None:
            shape = (batch.token_ids.shape[0], self.spec.hidden_size)
            residual = torch.empty(shape, dtype=self.dtype, device=batch.token_ids.device)
        else:
            residual = self._ends.embed(batch.token_ids)
            if batch.images is not None:
                residual[batch.images.places] = batch.images.embeddings()
        return self._ranks.spread(residual)

    def _with_own_rotation(self, batch: ForwardBatch, images: ImageBatch) -> tuple[ForwardBatch, torch.Tensor]:
        """An image's tokens are turned by three positions, which no row of the table has: the pass gets a table of its own, of
        one row per token, so that the layers need not know."""
        assert self._axis_of_pair is not None, "a model without sections takes no images"
        positions = torch.arange(batch.positions.shape[0], device=batch.positions.device)
        rows = rotary_rows(self._cos_sin, images.axes, self._axis_of_pair)
        return dataclasses.replace(batch, positions=positions), rows

    def _by_layer(self, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a pool's layers, made once: the pool is the same in every pass."""
        if kv is not self._kv:
            self._kv, self._kv_layers = kv, kv.unbind(0)
        return self._kv_layers
