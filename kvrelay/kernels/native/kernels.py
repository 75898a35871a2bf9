"""The kernels in C for float32 on CPUs: see linear.c, attention.c, elementwise.c.

Batch invariance holds for every kernel: a row's bits depend on that row, the weights and (attention) its own context - not on
the other rows, on how the prompt was cut into chunks, on the KV block size, or on the number of threads. So a request's logits
are the same alone and in any batch. They may differ in the last bits between processors, whose vectors differ in width, and
with AMX between the bulk of a prompt (`base.bulk_end`, bulk.c) and the rest: cached or inherited KV
may then differ in the last bits from KV computed anew.

Each method is one call of a C function: pointers and sizes only. C trusts them, so everything is checked here. What the C code
does not cover (odd head sizes) goes to the reference.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from kvrelay.kernels.base import (
    LINEARS,
    ForwardBatch,
    FusedLayer,
    HeadShape,
    LayerWeights,
    LinearName,
    LoraLayer,
    LoraSpans,
    Packed,
    Quantised,
)
from kvrelay.kernels.native.batch import FORMATS, BatchPointers, NativePacked, check_batch, is_plain, norm_pointer
from kvrelay.kernels.native.layer import SIGNATURE, NativeLayer, Workspaces
from kvrelay.kernels.native.lora import NativeAdapter, native_spans
from kvrelay.kernels.native.room import SharedMemory, WeightRoom
from kvrelay.kernels.ranks import Ranks
from kvrelay.kernels.torch_kernels import TorchKernels

_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 16  # attention.c works on so many of a head's dimensions at once
_MAX_GROUP = 64  # query heads per KV head
_TRIED_OUTPUTS, _TRIED_INPUTS = 160, 512  # several panels, several blocks of every format

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "packed_bytes": (_LONG,) * 3,
    "prefer_huge_pages": (_POINTER, _LONG),
    "map_shared": (_INT, _LONG, _INT),
    "settle_shared": (_POINTER, _LONG),
    "unmap_shared": (_POINTER, _LONG),
    "pack_weights": (_POINTER,) * 2 + (_LONG,) * 3 + (_INT,),
    "has_bulk": (),
    "linear": (_POINTER,) * 3 + (_LONG, _INT, _INT),
    "add_lora": (_POINTER,) * 3 + (_LONG,) * 2 + (_INT,) + (_LONG,) * 2 + (_INT,),
    "gather_rows": (_POINTER,) * 3 + (_LONG, _INT),
    "rms_norm": (_POINTER,) * 4 + (_LONG,) * 2 + (_FLOAT, _INT),
    "silu_mul": (_POINTER,) * 2 + (_LONG,) * 2 + (_INT,),
    "rope_and_store": (_POINTER,) * 9 + (_LONG,) * 4 + (_FLOAT, _INT),
    "attention": (_POINTER,) * 7 + (_LONG,) * 6 + (_FLOAT, _INT),
}
_SIGNATURES["decoder_layer"] = SIGNATURE
_RESULTS = {
    "map_shared": _POINTER,
    "packed_bytes": _LONG,
    "gather_rows": _INT,
    "has_bulk": _INT,
    "attention": _INT,
    "decoder_layer": _INT,
}


def _function(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = library[name]
    function.argtypes = _SIGNATURES[name]
    function.restype = _RESULTS.get(name)
    return function


class NativeKernels:
    """Implements `Kernels`. Remembers only the last batch's addresses and where the next weights go, so one instance may serve
    any number of models and threads. A batch's tensors may be refilled between passes but not replaced."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._reference = TorchKernels()
        self._weights = WeightRoom(_function(library, "prefer_huge_pages"))
        self.shared_memory = SharedMemory(*(_function(library, f"{name}_shared") for name in ("map", "settle", "unmap")))
        self.has_bulk = bool(_function(library, "has_bulk")())
        self._packed_bytes = _function(library, "packed_bytes")
        self._pack_weights = _function(library, "pack_weights")
        self._linear = _function(library, "linear")
        self._add_lora = _function(library, "add_lora")
        self._gather_rows = _function(library, "gather_rows")
        self._rms_norm = _function(library, "rms_norm")
        self._silu_mul = _function(library, "silu_mul")
        self._rope_and_store = _function(library, "rope_and_store")
        self._attention = _function(library, "attention")
        self._decoder_layer = _function(library, "decoder_layer")
        self._last_batch: BatchPointers | None = None
        self._workspaces = Workspaces()

    quantised_formats = frozenset(FORMATS[1:])

    @property
    def weight_bytes(self) -> int:
        """Of all weights that it has packed, or been given room for."""
        return self._weights.num_bytes

    def pack_inside(self, memory: torch.Tensor) -> AbstractContextManager[None]:
        """Weights that are packed meanwhile fill `memory`, in their order."""
        return self._weights.inside(memory)

    def layout(self) -> str:
        """Equal for kernels that pack weights alike: a digest of what they make of fixed bytes in each format."""
        digest = hashlib.blake2b(digest_size=8)
        for index in range(len(FORMATS)):
            held = torch.arange(_TRIED_OUTPUTS * _TRIED_INPUTS * 4).mul(37).remainder(251).to(torch.uint8)
            panels = torch.zeros(self._packed_bytes(_TRIED_INPUTS, _TRIED_OUTPUTS, index), dtype=torch.uint8)
            self._pack_weights(held.data_ptr(), panels.data_ptr(), _TRIED_INPUTS, _TRIED_OUTPUTS, index, 1)
            digest.update(panels.numpy().tobytes())
        return digest.hexdigest()

    def pack(
        self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> NativePacked:
        assert scale is None, "fp8 is computed by the kernels of cards"
        if isinstance(weight, Quantised):
            name, held, in_features = weight.format, weight.blocks.contiguous(), weight.in_features
        else:
            name, held, in_features = "F32", weight.float().contiguous(), weight.shape[1]
        out_features, index = held.shape[0], FORMATS.index(name)
        panels = self._weights.take(self._packed_bytes(in_features, out_features, index))
        if not held.is_meta:  # else the panels are there already
            self._pack_weights(held.data_ptr(), panels.data_ptr(), in_features, out_features, index, torch.get_num_threads())
        return NativePacked(panels, None if bias is None else bias.float().contiguous(), out_features, in_features, index)

    def fuse(self, weights: LayerWeights, ranks: Ranks) -> FusedLayer | None:
        if not _covers(weights.shape) or (weights.q_norm is None) != (weights.k_norm is None):
            return None
        if ranks.num_ranks > 1 and ranks.sum_in_c is None:
            return None
        return NativeLayer(weights, ranks, self._decoder_layer, self._pointers, self._workspaces)

    def linear(self, x: torch.Tensor, packed: Packed, *, bulk: bool = False) -> torch.Tensor:
        """`bulk`: as a fused layer computes the bulk of prompts."""
        assert isinstance(packed, NativePacked)
        assert self.has_bulk or not bulk
        rows = x.shape[0]
        assert is_plain(x, rows, packed.in_features)
        out = torch.empty(rows, packed.out_features)
        self._linear(x.data_ptr(), packed.address, out.data_ptr(), rows, bulk, torch.get_num_threads())
        return out

    def pack_adapter(self, layers: Sequence[LoraLayer]) -> NativeAdapter:
        return NativeAdapter(layers)

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, spans: LoraSpans, layer: int, name: LinearName) -> None:
        rows, in_features = x.shape
        assert is_plain(x, rows, in_features)
        assert is_plain(out, rows, out.shape[1])
        native = native_spans(spans)
        self._add_lora(
            x.data_ptr(),
            out.data_ptr(),
            native.address,
            native.count,
            layer,
            LINEARS.index(name),
            in_features,
            out.shape[1],
            torch.get_num_threads(),
        )

    def embed(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        assert isinstance(packed, NativePacked)
        rows = token_ids.shape[0]
        assert is_plain(token_ids, rows, dtype=torch.int64)
        out = torch.empty(rows, packed.in_features)
        found = self._gather_rows(token_ids.data_ptr(), packed.address, out.data_ptr(), rows, torch.get_num_threads())
        if found != rows:
            raise IndexError(f"token id {int(token_ids[found])} is not in the vocabulary of {packed.out_features}")
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        assert is_plain(x, rows, width)
        assert is_plain(weight, width)
        assert residual is None or is_plain(residual, rows, width)
        out = torch.empty_like(x)
        self._rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, both = gate_up.shape
        assert is_plain(gate_up, rows, both // 2 * 2)
        out = torch.empty(rows, both // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, both // 2, torch.get_num_threads())
        return out

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
        tokens, dim = qkv.shape[0], shape.head_dim
        if dim > _MAX_HEAD_DIM or (q_norm is None) != (k_norm is None):
            return self._reference.rope_and_store(qkv, shape, cos_sin, batch, kv, q_norm, k_norm, eps)
        assert is_plain(qkv, tokens, (shape.num_heads + 2 * shape.num_kv_heads) * dim)
        assert is_plain(cos_sin, cos_sin.shape[0], dim // 2 * 2)
        assert is_plain(kv, 2, kv.shape[1], kv.shape[2], shape.num_kv_heads, dim)
        pointers = self._pointers(batch)
        assert pointers.num_tokens == tokens
        q = torch.empty(tokens, shape.num_heads, dim)
        keys = kv.data_ptr()
        self._rope_and_store(
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            pointers.positions,
            pointers.slots,
            norm_pointer(q_norm, dim),
            norm_pointer(k_norm, dim),
            keys,
            keys + kv.numel() // 2 * 4,
            q.data_ptr(),
            tokens,
            shape.num_heads,
            shape.num_kv_heads,
            dim,
            eps,
            torch.get_num_threads(),
        )
        return q

    def _pointers(self, batch: ForwardBatch) -> BatchPointers:
        last = self._last_batch
        if last is None or last.batch is not batch:
            assert self.has_bulk or not batch.bulk, "these kernels know no bulk"
            self._last_batch = last = check_batch(batch)
        return last

    def attention(self, q: torch.Tensor, shape: HeadShape, batch: ForwardBatch, kv: torch.Tensor, scale: float) -> torch.Tensor:
        dim = shape.head_dim
        if not _covers(shape):
            return self._reference.attention(q, shape, batch, kv, scale)
        pointers = self._pointers(batch)
        tokens = pointers.num_tokens
        assert is_plain(q, tokens, shape.num_heads, dim)
        assert is_plain(kv, 2, kv.shape[1], kv.shape[2], shape.num_kv_heads, dim)
        out = torch.empty(tokens, shape.num_heads * dim)
        keys = kv.data_ptr()
        status = self._attention(
            q.data_ptr(),
            keys,
            keys + kv.numel() // 2 * 4,
            pointers.query_start,
            pointers.context_lens,
            pointers.block_tables,
            out.data_ptr(),
            pointers.num_rows,
            pointers.table_width,
            kv.shape[2],
            shape.num_heads,
            shape.num_kv_heads,
            dim,
            scale,
            torch.get_num_threads(),
        )
        if status != 0:
            raise MemoryError("no memory to plan attention")
        return out


def _covers(shape: HeadShape) -> bool:
    """Whether attention.c can do such heads."""
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    return dim <= _MAX_HEAD_DIM and dim % _HEAD_DIM_STEP == 0 and group <= _MAX_GROUP
