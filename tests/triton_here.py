"""The kernels for NVIDIA cards, where they can run: on a card, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from kvrelay.kernels.base import ForwardBatch, HeadShape, Kernels, Packed, Quantised

ON_CARD = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
if HAS_TRITON and not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels' modules are imported


def _patch_once() -> None:
    """The interpreter replaces Triton's language when a kernel begins, and looks all of it through again for each function that
    the kernel calls, which takes half of its time. Here it replaces what the kernel needs once."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[str] = set()  # modules, for the kernel that runs

    def patch_what_is_new(fn: Any) -> Any:
        names = {module.__name__ for module in fn.__globals__.values() if module is tl or module is tl.core}
        if replaced and names <= replaced:
            return None  # the kernel's own scope puts everything back
        is_kernel, scope = not replaced, patch(fn)
        replaced.update(names)
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = patch_what_is_new


if HAS_TRITON and not ON_CARD:
    _patch_once()


@functools.cache
def use_few_programs() -> None:
    """Rows that decode beside prompts are cut into 32 splits, so that a card is busy. Interpreted, each is a program that takes
    milliseconds: 4 of them, of which some are empty, are the same code."""
    if HAS_TRITON and not ON_CARD:
        from kvrelay.kernels.cuda import decode, table

        def few(num_heads: int, head_bytes: int) -> table.DecodeChoice:
            return dataclasses.replace(table.choose_mixed(num_heads, head_bytes), splits=4)

        decode.choose_mixed = few


class OnDevice:
    """Kernels of another device behind tensors of the CPU: takes arguments there and brings results and changes back."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    quantised_formats: frozenset[str] = frozenset()

    def pack(self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None) -> Packed:
        assert isinstance(weight, torch.Tensor)
        return self._kernels.pack(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self._kernels.linear(x.to(DEVICE), packed).cpu()

    def embed(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self._kernels.embed(token_ids.to(DEVICE), packed).cpu()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._kernels.rms_norm(x.to(DEVICE), weight.to(DEVICE), eps).cpu()

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        there = residual.to(DEVICE)
        normed = self._kernels.add_rms_norm(x.to(DEVICE), there, weight.to(DEVICE), eps)
        residual.copy_(there)
        return normed.cpu()

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
        there = kv.to(DEVICE)
        norms = [None if norm is None else norm.to(DEVICE) for norm in (q_norm, k_norm)]
        q = self._kernels.rope_and_store(
            qkv.to(DEVICE), shape, cos_sin.to(DEVICE), to_device(batch), there, norms[0], norms[1], eps
        )
        kv.copy_(there)
        return q.cpu()

    def attention(self, q: torch.Tensor, shape: HeadShape, batch: ForwardBatch, kv: torch.Tensor, scale: float) -> torch.Tensor:
        return self._kernels.attention(q.to(DEVICE), shape, to_device(batch), kv.to(DEVICE), scale).cpu()

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.silu_mul(gate_up.to(DEVICE)).cpu()


def to_device(batch: ForwardBatch) -> ForwardBatch:
    rows = batch.attention
    attention = dataclasses.replace(
        rows,
        query_start=rows.query_start.to(DEVICE),
        context_lens=rows.context_lens.to(DEVICE),
        block_tables=rows.block_tables.to(DEVICE),
    )
    return dataclasses.replace(
        batch,
        token_ids=batch.token_ids.to(DEVICE),
        positions=batch.positions.to(DEVICE),
        slots=batch.slots.to(DEVICE),
        attention=attention,
        logit_rows=batch.logit_rows.to(DEVICE),
    )
