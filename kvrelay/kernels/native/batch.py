"""What the native kernels know of their inputs: where they are, checked once."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.kernels.base import ForwardBatch
from kvrelay.kernels.native.lora import NativeSpans, native_spans


def is_plain(tensor: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether C may read `tensor` as an array of that shape."""
    return tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous()


def norm_pointer(weight: torch.Tensor | None, width: int) -> int | None:
    if weight is None:
        return None
    assert is_plain(weight, width)
    return weight.data_ptr()


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_long) for name in ("in_features", "out_features", "format")),
    ]


FORMATS = ("F32", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")  # in the order of weights.h


class NativePacked:
    """A weight in panels, see weights.h."""

    def __init__(
        self, panels: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int, format_index: int
    ) -> None:
        assert bias is None or is_plain(bias, out_features)
        self.out_features, self.in_features = out_features, in_features
        self.size_bytes = panels.numel()
        self._kept = (panels, bias)
        bias_pointer = None if bias is None else bias.data_ptr()
        self._in_c = _Weights(panels.data_ptr(), bias_pointer, in_features, out_features, format_index)
        self.address = ctypes.addressof(self._in_c)


@dataclass(frozen=True, slots=True)
class BatchPointers:
    """Where a batch's numbers are: checked once, used by every layer."""

    batch: ForwardBatch
    num_tokens: int
    num_rows: int
    table_width: int
    positions: int
    slots: int
    query_start: int
    context_lens: int
    block_tables: int
    spans: NativeSpans


def check_batch(batch: ForwardBatch) -> BatchPointers:
    rows = batch.attention
    num_tokens, num_rows, table_width = batch.positions.shape[0], rows.num_rows, rows.block_tables.shape[1]
    assert is_plain(batch.positions, num_tokens, dtype=torch.int64)
    assert is_plain(batch.slots, num_tokens, dtype=torch.int64)
    assert is_plain(rows.query_start, num_rows + 1, dtype=torch.int32)
    assert is_plain(rows.context_lens, num_rows, dtype=torch.int32)
    assert is_plain(rows.block_tables, num_rows, table_width, dtype=torch.int32)
    return BatchPointers(
        batch,
        num_tokens,
        num_rows,
        table_width,
        batch.positions.data_ptr(),
        batch.slots.data_ptr(),
        rows.query_start.data_ptr(),
        rows.context_lens.data_ptr(),
        rows.block_tables.data_ptr(),
        native_spans(() if batch.lora is None else batch.lora.tokens),
    )


class _Runs(ctypes.Structure):
    _fields_ = [("run", ctypes.c_void_p), ("count", ctypes.c_long), ("tokens", ctypes.c_long)]


TWO_KINDS = _Runs * 2


class Kinds:
    """The tokens of a pass that are not the bulk of their prompts, and those that are, as layer.c takes them."""

    def __init__(self, pointers: BatchPointers) -> None:
        bulk = pointers.batch.bulk
        begins, ends = [0, *(end for _, end in bulk)], [*(begin for begin, _ in bulk), pointers.num_tokens]
        others = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        self._kept = [(ctypes.c_int64 * (2 * len(runs)))(*itertools.chain(*runs)) for runs in (others, bulk)]
        self.in_c = TWO_KINDS(*map(_runs, self._kept, (others, bulk)))


def _runs(in_c: ctypes.Array[ctypes.c_int64], runs: Sequence[tuple[int, int]]) -> _Runs:
    return _Runs(ctypes.addressof(in_c), len(runs), sum(end - begin for begin, end in runs))
