"""LoRA adapters as lora.c reads them (lora.h), and which rows have which."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.kernels.base import LINEARS, LoraLayer, LoraPart, LoraSpans


class _Part(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_long) for name in ("rank", "first", "width")),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [("parts", ctypes.c_void_p), ("num_parts", ctypes.c_long)]


class _Layer(ctypes.Structure):
    _fields_ = [("linears", _Linear * len(LINEARS))]


class _Span(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_long), ("end", ctypes.c_long), ("layers", ctypes.c_void_p)]


class NativeAdapter:
    """Implements `PackedAdapter`. Keeps what it points to alive."""

    def __init__(self, layers: Sequence[LoraLayer]) -> None:
        self.num_layers = len(layers)
        self._kept: list[Any] = []
        in_c = (_Layer * len(layers))()
        for layer, parts_of in zip(in_c, layers, strict=True):
            for which, name in enumerate(LINEARS):
                parts = [self._part(part) for part in parts_of.get(name, ())]
                array = (_Part * len(parts))(*parts)
                self._kept.append(array)
                layer.linears[which] = _Linear(ctypes.addressof(array), len(parts))
        self._kept.append(in_c)
        self.address = ctypes.addressof(in_c)

    def _part(self, part: LoraPart) -> _Part:
        a, b = (tensor.to(torch.float32).contiguous() for tensor in (part.a, part.b))
        self._kept += [a, b]
        return _Part(a.data_ptr(), b.data_ptr(), a.shape[0], part.first, b.shape[1])


@dataclass(frozen=True, slots=True)
class NativeSpans:
    """Keeps the adapters that it points to alive."""

    spans: LoraSpans
    in_c: Any
    address: int | None
    count: int


NO_SPANS = NativeSpans((), None, None, 0)


def native_spans(spans: LoraSpans) -> NativeSpans:
    if not spans:
        return NO_SPANS
    in_c = (_Span * len(spans))()
    for place, span in enumerate(spans):
        assert isinstance(span.adapter, NativeAdapter)
        in_c[place] = _Span(span.begin, span.end, span.adapter.address)
    return NativeSpans(spans, in_c, ctypes.addressof(in_c), len(spans))
