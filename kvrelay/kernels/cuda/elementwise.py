"""Norms, rotation and activation: what stands between the linears and attention, unless one of these does it; one pass over
memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.base import ForwardBatch, HeadShape
from kvrelay.kernels.cuda.launch import kernel, options, power_of_2

UNALIGNED = ["positions", "slots"]  # inputs of a pass, which start anywhere: one compiled kernel for all
_ACTIVATION_BLOCK = 1024
_HEADS_PER_PROGRAM = 8
_HEADS_OF_ONE_TOKEN = 2  # of a token that is alone


@kernel()
def _norm_kernel(x, residual, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program. With ADD: residual += x first, in place."""
    if PDL:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    places = tl.program_id(0).to(tl.int64) * width + columns
    values = tl.load(x + places, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + places, mask=inside, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(residual + places, values, mask=inside)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(out + places, (normed.to(values.dtype) * factor).to(values.dtype), mask=inside)


def rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The one without a residual is a pass's first: it waits for all that was launched before."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    out = torch.empty_like(x)
    block = power_of_2(width)
    target = x if residual is None else residual
    _norm_kernel[(rows,)](
        x, target, weight, out, width, eps, ADD=residual is not None, BLOCK=block,
        **options(num_warps=min(8, max(1, block // 256)), after_all=residual is None),
    )  # fmt: skip
    return out


@kernel()
def _silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * width + columns, active * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    rows, both = gate_up.shape
    width = both // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(rows, width)
    block = min(_ACTIVATION_BLOCK, power_of_2(width))
    _silu_mul_kernel[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, **options())
    return out


@triton.jit
def _narrowed(values, kv):
    """As KV holds them: in fp8, what is beyond its range becomes its largest value."""
    if kv.dtype.element_ty == tl.float8e4nv:
        values = tl.minimum(tl.maximum(values.to(tl.float32), -448.0), 448.0)
    return values.to(kv.dtype.element_ty)


@triton.jit
def store_turned(
    first, second, one, two, cos, sin, head, pair, token, slot, inside, out, width, kv, value_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEPT_HEADS: tl.constexpr,
):  # fmt: skip
    """`first` and `second` are both halves of heads as the linear gave them, which values remain; `one` and `two` the same in
    float32, normed where there is a norm, from which queries and keys are turned. Keys and values go to their slots, the first
    KEPT_HEADS heads to rows of `out`. What is said of single elements are tiles or scalars that can be broadcast."""
    half: tl.constexpr = DIM // 2
    is_value = head >= HEADS + KV_HEADS
    first = tl.where(is_value, first, (one * cos - two * sin).to(first.dtype))
    second = tl.where(is_value, second, (two * cos + one * sin).to(second.dtype))
    places = out + token * width + head * DIM + pair
    is_kept = inside & (head < KEPT_HEADS)
    tl.store(places, first, mask=is_kept)
    tl.store(places + half, second, mask=is_kept)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    stored = kv + tl.where(is_value, value_offset, 0) + (slot * KV_HEADS + kv_head) * DIM + pair
    is_stored = inside & (head >= HEADS) & (slot + head * 0 >= 0)
    tl.store(stored, _narrowed(first, kv), mask=is_stored)
    tl.store(stored + half, _narrowed(second, kv), mask=is_stored)


@kernel(do_not_specialize_on_alignment=UNALIGNED)
def _rope_kernel(
    qkv, cos_sin, positions, slots, kv, value_offset, q_norm, k_norm, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one token a program. Each half of a head is a tile: a pair to be turned sits at one place of both."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    pair = tl.arange(0, HALF)
    half: tl.constexpr = DIM // 2
    slot = tl.load(slots + token)
    turn = cos_sin + tl.load(positions + token) * DIM + pair
    cos = tl.load(turn, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(turn + half, mask=pair < half, other=0.0)[None, :]
    if PDL:
        gdc_wait()
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < half)[None, :]
    places = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + pair[None, :]
    first = tl.load(places, mask=inside, other=0.0)
    second = tl.load(places + half, mask=inside, other=0.0)
    one, two = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        mean = (tl.sum(one * one, axis=1) + tl.sum(two * two, axis=1)) / DIM
        inverse = tl.rsqrt(mean + eps)[:, None]
        is_query = (head < HEADS)[:, None] & (pair < half)[None, :]
        is_key = (head >= HEADS)[:, None] & (pair < half)[None, :]
        q_places, k_places = q_norm + pair[None, :] + head[:, None] * 0, k_norm + pair[None, :] + head[:, None] * 0
        factor_one = tl.load(q_places, mask=is_query, other=0.0) + tl.load(k_places, mask=is_key, other=0.0)
        factor_two = tl.load(q_places + half, mask=is_query, other=0.0) + tl.load(k_places + half, mask=is_key, other=0.0)
        one = ((one * inverse).to(first.dtype) * factor_one).to(tl.float32)
        two = ((two * inverse).to(first.dtype) * factor_two).to(tl.float32)
    store_turned(
        first, second, one, two, cos, sin, head[:, None], pair[None, :], token, slot, inside, qkv,
        (HEADS + 2 * KV_HEADS) * DIM, kv, value_offset, HEADS, KV_HEADS, DIM, HEADS + KV_HEADS if KEEP else HEADS,
    )  # fmt: skip


def rope_and_store(
    qkv: torch.Tensor,
    shape: HeadShape,
    cos_sin: torch.Tensor,
    batch: ForwardBatch,
    kv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    *,
    keep: bool,
) -> torch.Tensor:
    """Turns q in place, so the result is a view of qkv. With `keep` the turned keys are written back there too. A token whose
    slot is negative (padding) is stored nowhere."""
    assert all(tensor.is_contiguous() for tensor in (qkv, cos_sin, kv))
    tokens, heads, dim = qkv.shape[0], shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
    norm = q_norm is not None and k_norm is not None
    head_block = _HEADS_OF_ONE_TOKEN if tokens == 1 else _HEADS_PER_PROGRAM
    _rope_kernel[(tokens, triton.cdiv(heads, head_block))](
        qkv, cos_sin, batch.positions, batch.slots, kv, kv.stride(0),
        q_norm if norm else cos_sin, k_norm if norm else cos_sin, eps,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=dim, HALF=power_of_2(dim // 2),
        HEAD_BLOCK=head_block, NORM=norm, KEEP=keep, **options(num_warps=2),
    )  # fmt: skip
    return qkv.view(tokens, heads, dim)[:, : shape.num_heads]
