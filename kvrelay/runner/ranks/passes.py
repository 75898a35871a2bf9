"""Forward batches on their way from rank 0 to the others."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, ImageBatch
from kvrelay.wire.ranks import ImagePass, Pass


def to_pass(batch: ForwardBatch) -> Pass:
    rows, images = batch.attention, batch.images
    return Pass(
        num_tokens=batch.token_ids.shape[0],
        positions=_bytes(batch.positions),
        slots=_bytes(batch.slots),
        query_start=_bytes(rows.query_start),
        context_lens=_bytes(rows.context_lens),
        block_tables=_bytes(rows.block_tables),
        max_query=rows.max_query,
        max_context=rows.max_context,
        lengths=None if rows.lengths is None else list(rows.lengths),
        logit_rows=_bytes(batch.logit_rows),
        images=None
        if images is None
        else ImagePass(
            axes=_bytes(images.axes),
            places=_bytes(images.places),
            features=_bytes(images.features),
            num_deepstack=images.num_deepstack,
        ),
    )


def to_batch(message: Pass, dtype: torch.dtype) -> ForwardBatch:
    """Without the tokens, which only rank 0 needs: in their place are zeros."""
    context_lens = _tensor(message.context_lens, torch.int32)
    return ForwardBatch(
        token_ids=torch.zeros(message.num_tokens, dtype=torch.int64),
        positions=_tensor(message.positions, torch.int64),
        slots=_tensor(message.slots, torch.int64),
        attention=AttentionBatch(
            query_start=_tensor(message.query_start, torch.int32),
            context_lens=context_lens,
            block_tables=_tensor(message.block_tables, torch.int32).view(len(context_lens), -1),
            max_query=message.max_query,
            max_context=message.max_context,
            lengths=None if message.lengths is None else tuple(message.lengths),
        ),
        logit_rows=_tensor(message.logit_rows, torch.int64),
        images=None if message.images is None else _image_batch(message.images, message.num_tokens, dtype),
    )


def _image_batch(images: ImagePass, num_tokens: int, dtype: torch.dtype) -> ImageBatch:
    places = _tensor(images.places, torch.int64)
    return ImageBatch(
        axes=_tensor(images.axes, torch.int64).view(3, num_tokens),
        places=places,
        features=_tensor(images.features, dtype).view(len(places), -1),
        num_deepstack=images.num_deepstack,
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    array = tensor.contiguous().view(torch.uint8).numpy() if tensor.numel() else np.empty(0, dtype=np.uint8)
    return bytes(array.tobytes())


def _tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
