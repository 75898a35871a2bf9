"""Forward batches on their way from rank 0 to the others: a message with the shape, and tensors that are spread.

Steps that decode follow one another with the same shape, so their messages are equal until a block table grows. A rank that
receives the same message twice in a row reuses the tensors and only receives their contents.
"""

from __future__ import annotations

import dataclasses

import torch

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, ImageBatch, LoraBatch
from kvrelay.kernels.ranks import Ranks
from kvrelay.wire.ranks import ImagesShape, LoraPass, Pass


def to_pass(batch: ForwardBatch, block_size: int, lora: LoraPass | None, dropped: list[int]) -> Pass:
    """Of rows that decode, the longest context is as long as their block tables allow: it bounds what is read, and changes less
    often."""
    rows, images = batch.attention, batch.images
    num_blocks = rows.block_tables.shape[1]
    return Pass(
        num_tokens=batch.token_ids.shape[0],
        num_rows=rows.num_rows,
        num_blocks=num_blocks,
        num_logits=batch.logit_rows.shape[0],
        max_query=rows.max_query,
        max_context=rows.max_context if rows.max_query > 1 else num_blocks * block_size,
        lengths=None if rows.lengths is None else list(rows.lengths),
        longest_end=None if batch.ends is None else batch.ends.max_context,
        images=None
        if images is None
        else ImagesShape(num_places=images.places.shape[0], width=images.features.shape[1], num_deepstack=images.num_deepstack),
        lora=lora,
        bulk=batch.bulk,
        dropped=dropped,
        name=batch.name,
    )


def spread_inputs(batch: ForwardBatch, ranks: Ranks) -> None:
    """Rank 0's side of `PassInputs`."""
    rows, images = batch.attention, batch.images
    longs = [batch.positions, batch.slots, batch.logit_rows]
    if images is not None:
        longs += [images.axes, images.places]
    ints = [rows.query_start, rows.context_lens, rows.block_tables]
    wide = [part.long() for part in longs] + [part.int() for part in ints]
    ranks.spread(torch.cat([part.reshape(-1).view(torch.uint8) for part in wide]))
    if images is not None:
        ranks.spread(images.features)


class PassInputs:
    """What passes of that shape read, in a rank that is not the first: always the same tensors."""

    def __init__(self, message: Pass, dtype: torch.dtype, device: torch.device) -> None:
        tokens, num_rows, images = message.num_tokens, message.num_rows, message.images
        longs = [tokens, tokens, message.num_logits]
        if images is not None:
            longs += [3 * tokens, images.num_places]
        ints = [num_rows + 1, num_rows, num_rows * message.num_blocks]
        self._flat = torch.empty(8 * sum(longs) + 4 * sum(ints), dtype=torch.uint8, device=device)
        positions, slots, logit_rows, *of_images = self._flat[: 8 * sum(longs)].view(torch.int64).split_with_sizes(longs)
        query_start, context_lens, tables = self._flat[8 * sum(longs) :].view(torch.int32).split_with_sizes(ints)
        tables = tables.view(num_rows, message.num_blocks)
        self._images = None
        if images is not None:
            axes, places = of_images
            features = torch.empty(images.num_places, images.width, dtype=dtype, device=device)
            self._images = ImageBatch(axes.view(3, tokens), places, features, images.num_deepstack)
        ends = None
        if message.longest_end is not None:
            one_row = torch.arange(2, dtype=torch.int32, device=device)
            ends = AttentionBatch(one_row, context_lens, tables, max_query=1, max_context=message.longest_end)
        self._batch = ForwardBatch(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),  # which only rank 0 needs
            positions=positions,
            slots=slots,
            attention=AttentionBatch(
                query_start=query_start,
                context_lens=context_lens,
                block_tables=tables,
                max_query=message.max_query,
                max_context=message.max_context,
                lengths=None if message.lengths is None else tuple(message.lengths),
            ),
            logit_rows=logit_rows,
            ends=ends,
            images=self._images,
            bulk=message.bulk,
        )

    def receive(self, ranks: Ranks, lora: LoraBatch | None) -> ForwardBatch:
        _spread_into(self._flat, ranks)
        if self._images is not None:
            _spread_into(self._images.features, ranks)
        return self._batch if lora is None else dataclasses.replace(self._batch, lora=lora)


def _spread_into(tensor: torch.Tensor, ranks: Ranks) -> None:
    came = ranks.spread(tensor)
    assert came is tensor or came.data_ptr() == tensor.data_ptr(), "what is contiguous is written where it is"
