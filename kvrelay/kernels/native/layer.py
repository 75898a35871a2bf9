"""A decoder layer in one native call (layer.c). Decoding a small batch, the way from Python to C and back would otherwise take
a tenth of a step: nine calls for each of thirty layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.kernels.base import ForwardBatch, LayerWeights
from kvrelay.kernels.native.batch import TWO_KINDS, BatchPointers, Kinds, NativePacked, is_plain, norm_pointer
from kvrelay.kernels.ranks import Ranks, check_met

_POINTERS = ("input_norm", "q_norm", "k_norm", "post_norm", "qkv", "output", "gate_up", "down")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_long) for name in ("index", "heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("add_up", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("cos_sin", "positions", "slots", "query_start", "context_lens", "tables", "spans")
        ),
        *((name, ctypes.c_long) for name in ("tokens", "rows", "table_stride", "block_size", "num_spans")),
        ("runs", TWO_KINDS),
        ("threads", ctypes.c_int),
    ]


_RANK_ENDED = 2  # of layer.c
SIGNATURE = (ctypes.c_void_p,) * 8


@dataclass(frozen=True, slots=True)
class _Workspace:
    """What the layers of one pass share: everything about it in C's terms, room for what is between, and what a layer gives."""

    pointers: BatchPointers
    cos_sin: torch.Tensor
    residual: torch.Tensor
    scratch: torch.Tensor
    out: torch.Tensor
    in_c: _Pass
    kinds: Kinds  # to which in_c points
    pass_address: int
    residual_address: int
    scratch_address: int
    out_address: int

    def serves(self, pointers: BatchPointers, cos_sin: torch.Tensor, residual: torch.Tensor, scratch_width: int) -> bool:
        return (
            self.pointers is pointers
            and self.residual is residual
            and self.cos_sin is cos_sin
            and self.scratch.shape[1] >= scratch_width
        )


class Workspaces:
    """The latest pass's. Passes of several threads take turns, each with its own."""

    def __init__(self) -> None:
        self.latest: _Workspace | None = None


class NativeLayer:
    """Implements `FusedLayer`. Keeps the weights that it points to alive."""

    def __init__(
        self,
        weights: LayerWeights,
        ranks: Ranks,
        run: Callable[..., int],
        pointers: Callable[[ForwardBatch], BatchPointers],
        workspaces: Workspaces,
    ) -> None:
        self._weights = weights
        self._ranks = ranks
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
        summed = ranks.sum_in_c
        self._layer = _Layer(
            norm_pointer(weights.input_norm, self._hidden), norm_pointer(weights.q_norm, shape.head_dim),
            norm_pointer(weights.k_norm, shape.head_dim), norm_pointer(weights.post_norm, self._hidden),
            qkv.address, output.address, gate_up.address, down.address,
            weights.index, shape.num_heads, shape.num_kv_heads, shape.head_dim, weights.eps, weights.scale,
            *(() if summed is None else (summed.function, summed.ranks)),
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)
        gathered = max(packed.in_features + packed.out_features for packed in (qkv, output, gate_up, down))
        self._scratch_width = self._hidden + qkv.out_features + 2 * q_width + 3 * width + gathered
        self._workspaces = workspaces
        self._kv: torch.Tensor | None = None  # as it was last seen, and where its keys and values are
        self._keys = self._values = 0

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        space, pointers = self._workspaces.latest, self._pointers(batch)
        if space is None or not space.serves(pointers, cos_sin, residual, self._scratch_width):
            space = self._workspaces.latest = self._new_workspace(pointers, cos_sin, residual, kv.shape[2])
        if kv is not self._kv:
            self._find(kv)
        assert x is None or x is space.out or is_plain(x, pointers.num_tokens, self._hidden)
        status = self._run(
            self._address,
            space.pass_address,
            None if x is None else x.data_ptr(),
            space.residual_address,
            self._keys,
            self._values,
            space.scratch_address,
            space.out_address,  # x itself from the second layer on: it has been read before this is written
        )
        if status == _RANK_ENDED:
            check_met(status)
        if status != 0:
            raise MemoryError("no memory to plan attention")
        return space.out

    def _find(self, kv: torch.Tensor) -> None:
        shape = self._weights.shape
        assert is_plain(kv, 2, kv.shape[1], kv.shape[2], shape.num_kv_heads, shape.head_dim)
        self._kv, self._keys = kv, kv.data_ptr()
        self._values = self._keys + kv.numel() // 2 * 4

    def _new_workspace(
        self, pointers: BatchPointers, cos_sin: torch.Tensor, residual: torch.Tensor, block_size: int
    ) -> _Workspace:
        tokens = pointers.num_tokens
        assert is_plain(residual, tokens, self._hidden)
        assert is_plain(cos_sin, cos_sin.shape[0], self._weights.shape.head_dim)
        scratch, out = torch.empty(tokens, self._scratch_width), torch.empty(tokens, self._hidden)
        kinds = Kinds(pointers)
        in_c = _Pass(
            cos_sin.data_ptr(), pointers.positions, pointers.slots, pointers.query_start, pointers.context_lens,
            pointers.block_tables, pointers.spans.address, tokens, pointers.num_rows, pointers.table_width, block_size,
            pointers.spans.count, kinds.in_c, torch.get_num_threads(),
        )  # fmt: skip
        return _Workspace(
            pointers, cos_sin, residual, scratch, out, in_c, kinds,
            ctypes.addressof(in_c), residual.data_ptr(), scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip


def _native(packed: object) -> NativePacked:
    assert isinstance(packed, NativePacked)
    return packed
