"""Forward batches on their way from rank 0 to the others: a message with the shape, and tensors that are spread."""

from __future__ import annotations

import torch

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, ImageBatch, LoraBatch
from kvrelay.kernels.ranks import Ranks
from kvrelay.wire.ranks import ImagesShape, LoraPass, Pass


def to_pass(batch: ForwardBatch, lora: LoraPass | None, dropped: list[int]) -> Pass:
    rows, images = batch.attention, batch.images
    return Pass(
        num_tokens=batch.token_ids.shape[0],
        num_rows=rows.num_rows,
        num_blocks=rows.block_tables.shape[1],
        num_logits=batch.logit_rows.shape[0],
        max_query=rows.max_query,
        max_context=rows.max_context,
        lengths=None if rows.lengths is None else list(rows.lengths),
        longest_end=None if batch.ends is None else batch.ends.max_context,
        images=None
        if images is None
        else ImagesShape(num_places=images.places.shape[0], width=images.features.shape[1], num_deepstack=images.num_deepstack),
        lora=lora,
        dropped=dropped,
        name=batch.name,
    )


def spread_inputs(batch: ForwardBatch, ranks: Ranks) -> None:
    """Rank 0's side of `PassInputs`."""
    rows, images = batch.attention, batch.images
    parts = [batch.positions, batch.slots, rows.query_start, rows.context_lens, rows.block_tables, batch.logit_rows]
    if images is not None:
        parts += [images.axes, images.places]
    ranks.spread(torch.cat([part.reshape(-1).int() for part in parts]))
    if images is not None:
        ranks.spread(images.features)


class PassInputs:
    """What a pass of that shape reads, in a rank that is not the first."""

    def __init__(self, message: Pass, dtype: torch.dtype, device: torch.device) -> None:
        self._message = message
        images = message.images
        self._sizes = [
            message.num_tokens, message.num_tokens, message.num_rows + 1, message.num_rows,
            message.num_rows * message.num_blocks, message.num_logits,
        ]  # fmt: skip
        if images is not None:
            self._sizes += [3 * message.num_tokens, images.num_places]
            self._features = torch.empty(images.num_places, images.width, dtype=dtype, device=device)
        self._flat = torch.empty(sum(self._sizes), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(message.num_tokens, dtype=torch.int64, device=device)  # which only rank 0 needs
        self._one_row = torch.arange(2, dtype=torch.int32, device=device)

    def receive(self, ranks: Ranks, lora: LoraBatch | None) -> ForwardBatch:
        message = self._message
        flat = ranks.spread(self._flat)
        parts = torch.split(flat, self._sizes)
        positions, slots, query_start, context_lens, tables, logit_rows, *image_parts = parts
        images = None
        if message.images is not None:
            axes, places = (part.long() for part in image_parts)
            features = ranks.spread(self._features)
            images = ImageBatch(axes.view(3, message.num_tokens), places, features, message.images.num_deepstack)
        rows = AttentionBatch(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=tables.view(message.num_rows, message.num_blocks),
            max_query=message.max_query,
            max_context=message.max_context,
            lengths=None if message.lengths is None else tuple(message.lengths),
        )
        return ForwardBatch(
            token_ids=self._tokens,
            positions=positions.long(),
            slots=slots.long(),
            attention=rows,
            logit_rows=logit_rows.long(),
            ends=None
            if message.longest_end is None
            else AttentionBatch(self._one_row, context_lens, rows.block_tables, max_query=1, max_context=message.longest_end),
            images=images,
            lora=lora,
        )
