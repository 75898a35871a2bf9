"""Forward batches on their way from rank 0 to the others."""

from __future__ import annotations

import torch

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, ImageBatch, LoraBatch
from kvrelay.wire.ranks import ImagePass, LoraPass, Pass


def to_pass(batch: ForwardBatch, lora: LoraPass | None, dropped: list[int]) -> Pass:
    rows, images = batch.attention, batch.images
    return Pass(
        num_tokens=batch.token_ids.shape[0],
        positions=bytes_of(batch.positions),
        slots=bytes_of(batch.slots),
        query_start=bytes_of(rows.query_start),
        context_lens=bytes_of(rows.context_lens),
        block_tables=bytes_of(rows.block_tables),
        max_query=rows.max_query,
        max_context=rows.max_context,
        lengths=None if rows.lengths is None else list(rows.lengths),
        logit_rows=bytes_of(batch.logit_rows),
        images=None
        if images is None
        else ImagePass(
            axes=bytes_of(images.axes),
            places=bytes_of(images.places),
            features=bytes_of(images.features),
            num_deepstack=images.num_deepstack,
        ),
        lora=lora,
        dropped=dropped,
    )


def to_batch(message: Pass, dtype: torch.dtype, lora: LoraBatch | None) -> ForwardBatch:
    """Without the tokens, which only rank 0 needs: in their place are zeros."""
    context_lens = tensor_of(message.context_lens, torch.int32)
    return ForwardBatch(
        token_ids=torch.zeros(message.num_tokens, dtype=torch.int64),
        positions=tensor_of(message.positions, torch.int64),
        slots=tensor_of(message.slots, torch.int64),
        attention=AttentionBatch(
            query_start=tensor_of(message.query_start, torch.int32),
            context_lens=context_lens,
            block_tables=tensor_of(message.block_tables, torch.int32).view(len(context_lens), -1),
            max_query=message.max_query,
            max_context=message.max_context,
            lengths=None if message.lengths is None else tuple(message.lengths),
        ),
        logit_rows=tensor_of(message.logit_rows, torch.int64),
        images=None if message.images is None else _image_batch(message.images, message.num_tokens, dtype),
        lora=lora,
    )


def _image_batch(images: ImagePass, num_tokens: int, dtype: torch.dtype) -> ImageBatch:
    places = tensor_of(images.places, torch.int64)
    return ImageBatch(
        axes=tensor_of(images.axes, torch.int64).view(3, num_tokens),
        places=places,
        features=tensor_of(images.features, dtype).view(len(places), -1),
        num_deepstack=images.num_deepstack,
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.dtype is torch.bfloat16:  # which numpy has not
        tensor = tensor.contiguous().view(torch.uint8)
    return bytes(tensor.numpy().tobytes())


def tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
