"""A decoder layer in one native call (layer.c). Decoding a small batch, the way from Python to C and back would otherwise take
a tenth of a step: nine calls for each of thirty layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from kvrelay.runner.kernels.base import ForwardBatch, LayerWeights
from kvrelay.runner.kernels.native_batch import BatchPointers, NativePacked, is_plain

_POINTERS = (
    "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias", "post_norm", "gate_up", "gate_up_bias",
    "down", "down_bias",
)  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_long) for name in ("hidden", "width", "heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos_sin", "positions", "slots", "query_start", "context_lens", "tables")),
        *((name, ctypes.c_long) for name in ("tokens", "rows", "table_stride", "block_size")),
        ("threads", ctypes.c_int),
    ]


SIGNATURE = (ctypes.c_void_p,) * 8


class NativeLayer:
    """Implements `FusedLayer`. Keeps the weights that it points to alive."""

    def __init__(
        self, weights: LayerWeights, run: Callable[..., int], pointers: Callable[[ForwardBatch], BatchPointers]
    ) -> None:
        self._weights = weights
        self._run = run
        self._pointers = pointers
        shape = weights.shape
        qkv, output, gate_up, down = (_native(p) for p in (weights.qkv, weights.output, weights.gate_up, weights.down))
        self._hidden, width = qkv.in_features, down.in_features
        q_width = shape.num_heads * shape.head_dim
        assert qkv.out_features == q_width + 2 * shape.num_kv_heads * shape.head_dim
        assert (output.in_features, output.out_features) == (q_width, self._hidden)
        assert (gate_up.in_features, gate_up.out_features) == (self._hidden, 2 * width)
        assert down.out_features == self._hidden
        self._layer = _Layer(
            _norm(weights.input_norm, self._hidden), qkv.panels_pointer, qkv.bias_pointer,
            _norm(weights.q_norm, shape.head_dim), _norm(weights.k_norm, shape.head_dim),
            output.panels_pointer, output.bias_pointer, _norm(weights.post_norm, self._hidden),
            gate_up.panels_pointer, gate_up.bias_pointer, down.panels_pointer, down.bias_pointer,
            self._hidden, width, shape.num_heads, shape.num_kv_heads, shape.head_dim, weights.eps, weights.scale,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)
        self._scratch_width = self._hidden + qkv.out_features + 2 * q_width + 3 * width
        self._last: tuple[BatchPointers, torch.Tensor, _Pass] | None = None

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        shape, pointers = self._weights.shape, self._pointers(batch)
        tokens = pointers.num_tokens
        assert x is None or is_plain(x, tokens, self._hidden)
        assert is_plain(residual, tokens, self._hidden)
        assert is_plain(kv, 2, kv.shape[1], kv.shape[2], shape.num_kv_heads, shape.head_dim)
        scratch = torch.empty(tokens, self._scratch_width)
        out = torch.empty(tokens, self._hidden)
        keys = kv.data_ptr()
        status = self._run(
            self._address,
            ctypes.addressof(self._pass(pointers, cos_sin, kv.shape[2])),
            None if x is None else x.data_ptr(),
            residual.data_ptr(),
            keys,
            keys + kv.numel() // 2 * 4,
            scratch.data_ptr(),
            out.data_ptr(),
        )
        if status != 0:
            raise MemoryError("no memory to plan attention")
        return out

    def _pass(self, pointers: BatchPointers, cos_sin: torch.Tensor, block_size: int) -> _Pass:
        last = self._last
        if last is not None and last[0] is pointers and last[1] is cos_sin:
            return last[2]
        assert is_plain(cos_sin, cos_sin.shape[0], self._weights.shape.head_dim)
        made = _Pass(
            cos_sin.data_ptr(), pointers.positions, pointers.slots, pointers.query_start, pointers.context_lens,
            pointers.block_tables, pointers.num_tokens, pointers.num_rows, pointers.table_width, block_size,
            torch.get_num_threads(),
        )  # fmt: skip
        self._last = (pointers, cos_sin, made)
        return made


def _native(packed: object) -> NativePacked:
    assert isinstance(packed, NativePacked)
    return packed


def _norm(weight: torch.Tensor | None, width: int) -> int | None:
    if weight is None:
        return None
    assert is_plain(weight, width)
    return weight.data_ptr()
