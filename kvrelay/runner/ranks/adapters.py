"""LoRA adapters where a model is split. An adapter is split as the matrices that it changes are: where a rank has some of their
rows, it has B for its outputs; where it has some of their columns, A for its inputs, and the sum of the ranks has the whole.

    rank 0    reads an adapter, cuts it, tells each rank its share, and packs its own
    rank      keeps its share until a pass says that rank 0 has dropped the adapter

Between ranks an adapter is a number, new for each that is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.kernels.base import ForwardBatch, Kernels, LoraBatch, LoraLayer, LoraPart, LoraSpan, LoraSpans, PackedAdapter
from kvrelay.runner.lora import modules_of
from kvrelay.runner.ranks.group import RankGroup
from kvrelay.runner.ranks.shares import RankShare
from kvrelay.wire.ranks import AdapterPart, AdapterShare, LoraPass


class SplitAdapter:
    """Implements `PackedAdapter`: rank 0's share, and the number by which the others know theirs."""

    def __init__(self, number: int, packed: PackedAdapter) -> None:
        self.number = number
        self.packed = packed
        self.num_layers = packed.num_layers


class SplitAdapters:
    """Rank 0's side. `pack` may be called from any thread, all else from the one that runs the model."""

    def __init__(self, whole: ModelSpec, num_ranks: int, kernels: Kernels, group: RankGroup) -> None:
        self._shares = [RankShare(whole, rank, num_ranks) for rank in range(num_ranks)]
        self._kernels = kernels
        self._group = group
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()

    def pack(self, layers: Sequence[LoraLayer]) -> SplitAdapter:
        own, *others = (cut(layers, share) for share in self._shares)
        adapter = SplitAdapter(next(self._numbers), self._kernels.pack_adapter(own))
        self._group.tell_each([to_share(adapter.number, theirs) for theirs in others])
        weakref.finalize(adapter, self._dropped.append, adapter.number).atexit = False
        return adapter

    def take_dropped(self) -> list[int]:
        """Those that no request has any more, each once."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class HeldAdapters:
    """Those of a rank that is not the first."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._packed: dict[int, PackedAdapter] = {}

    def hold(self, share: AdapterShare) -> None:
        layers: list[LoraLayer] = [{} for _ in range(share.num_layers)]
        for part in share.parts:
            a, b = (tensor_of(data, self._dtype).view(part.rank, -1).to(self._device) for data in (part.a, part.b))
            layers[part.layer].setdefault(part.linear, []).append(LoraPart(part.first, a, b))
        self._packed[share.number] = self._kernels.pack_adapter(layers)

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._packed[number]

    def batch(self, lora: LoraPass | None) -> LoraBatch | None:
        return None if lora is None else LoraBatch(tokens=self._spans(lora.tokens), outputs=self._spans(lora.outputs))

    def _spans(self, spans: Sequence[tuple[int, int, int]]) -> LoraSpans:
        return tuple(LoraSpan(begin, end, self._packed[number]) for begin, end, number in spans)


def cut(layers: Sequence[LoraLayer], share: RankShare) -> list[LoraLayer]:
    """A rank's share of an adapter of the whole model."""
    names = {(module.linear, module.first): name for name, module in modules_of(share.whole).items()}
    places = modules_of(share.spec)
    cut_layers: list[LoraLayer] = [{} for _ in layers]
    for kept, layer in zip(cut_layers, layers, strict=True):
        for linear, parts in layer.items():
            modules = [names[linear, part.first] for part in parts]
            kept[linear] = [
                _cut_part(part, share, module.rpartition(".")[2], places[module].first)
                for part, module in zip(parts, modules, strict=True)
            ]
    return cut_layers


def _cut_part(part: LoraPart, share: RankShare, projection: str, first: int) -> LoraPart:
    rows, columns = share.rows(projection), share.columns(projection)
    if rows is not None:
        return LoraPart(first, part.a, part.b[:, rows[0]].contiguous())
    assert columns is not None, "every projection is split"
    a = part.a[:, columns[0]].contiguous()
    if projection == "o_proj":
        a[:, : share.num_repeated_columns] = 0.0
    return LoraPart(first, a, part.b)


def to_share(number: int, layers: Sequence[LoraLayer]) -> AdapterShare:
    parts = [
        AdapterPart(layer=index, linear=linear, first=part.first, rank=part.a.shape[0], a=bytes_of(part.a), b=bytes_of(part.b))
        for index, layer in enumerate(layers)
        for linear, of_linear in layer.items()
        for part in of_linear
    ]
    return AdapterShare(number=number, num_layers=len(layers), parts=parts)


def to_lora_pass(lora: LoraBatch | None) -> LoraPass | None:
    return None if lora is None else LoraPass(tokens=_numbered(lora.tokens), outputs=_numbered(lora.outputs))


def _numbered(spans: LoraSpans) -> list[tuple[int, int, int]]:
    return [(span.begin, span.end, _split(span).number) for span in spans]


def own_share(batch: ForwardBatch) -> ForwardBatch:
    """The batch with rank 0's shares of its adapters."""
    if batch.lora is None:
        return batch
    tokens, outputs = (
        tuple(LoraSpan(span.begin, span.end, _split(span).packed) for span in spans)
        for spans in (batch.lora.tokens, batch.lora.outputs)
    )
    return dataclasses.replace(batch, lora=LoraBatch(tokens=tokens, outputs=outputs))


def _split(span: LoraSpan) -> SplitAdapter:
    assert isinstance(span.adapter, SplitAdapter)
    return span.adapter


def bytes_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:  # which numpy has not
        tensor = tensor.contiguous().view(torch.uint8)
    return bytes(tensor.numpy().tobytes())


def tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
