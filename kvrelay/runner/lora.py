"""LoRA adapters in memory: read from PEFT's folders, held beside the model, and found by the rows of a pass.

    read      config and tensors checked against the model -> packed; beside what else runs
    add       found from now on by the digest of its content
    find      the engine, when a request asks for it; the request holds on to what it found
    unload    no request finds it any more; its memory goes with the last request that has it

Only the linear layers of the decoder can be adapted. The tensors of an adapter say which of them it changes.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kvrelay.checkpoint.lora import TENSOR_PREFIX, WEIGHTS_NAME, LoraSpec, lora_digest, read_lora
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.engine.interfaces import LoadedAdapter, Row
from kvrelay.errors import ModelError, UnsupportedModelError, WrongShapeError
from kvrelay.kernels.base import LinearName, LoraBatch, LoraLayer, LoraPart, LoraSpan, LoraSpans, PackedAdapter
from kvrelay.runner.loader import canonical_name
from kvrelay.wire.registry import Adapter

Pack = Callable[[Sequence[LoraLayer]], PackedAdapter]  # as `Kernels.pack_adapter`

_ENDS = {".lora_A.weight": "a", ".lora_B.weight": "b"}


@dataclass(frozen=True, slots=True)
class Module:
    """One of the projections that a linear layer of ours is put together from."""

    linear: LinearName
    first: int  # of its outputs there
    out: int
    inputs: int


@dataclass(frozen=True, slots=True, eq=False)
class RunnerAdapter:
    """Implements `LoadedAdapter`."""

    digest: str
    packed: PackedAdapter


class LoraAdapters:
    """Implements `Adapters` for one model. `read` may be called from any thread, all else from one."""

    def __init__(self, spec: ModelSpec, pack: Pack, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._pack = pack
        self._device = device
        self._dtype = dtype
        self._modules = modules_of(spec)
        self._records: dict[str, Adapter] = {}  # by name
        self._loaded: dict[str, RunnerAdapter] = {}  # by digest

    def find(self, digest: str) -> LoadedAdapter | None:
        return self._loaded.get(digest)

    def records(self) -> list[Adapter]:
        return list(self._records.values())

    def read(self, path: str) -> RunnerAdapter:
        folder = pathlib.Path(path).expanduser()
        adapter = RunnerAdapter(lora_digest(folder), self._pack(self._read(folder, read_lora(folder))))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the thread that uses it may have another stream
        return adapter

    def add(self, name: str, path: str, adapter: LoadedAdapter) -> None:
        assert isinstance(adapter, RunnerAdapter)
        self._loaded.setdefault(adapter.digest, adapter)
        self._records[name] = Adapter(name=name, digest=adapter.digest, path=path)
        self._drop_unnamed()

    def unload(self, name: str) -> bool:
        found = self._records.pop(name, None) is not None
        self._drop_unnamed()
        return found

    def _drop_unnamed(self) -> None:
        named = {record.digest for record in self._records.values()}
        self._loaded = {digest: adapter for digest, adapter in self._loaded.items() if digest in named}

    def _read(self, folder: pathlib.Path, spec: LoraSpec) -> Sequence[LoraLayer]:
        path = folder / WEIGHTS_NAME
        layers: list[LoraLayer] = [{} for _ in range(self._spec.num_layers)]
        try:
            with safe_open(path, framework="pt") as stored:
                for module, tensors in _by_module(path, stored).items():
                    place = self._place(path, module)
                    part = self._part(path, module, place[1], spec, tensors)
                    layers[place[0]].setdefault(place[1].linear, []).append(part)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        for layer in layers:
            for parts in layer.values():
                parts.sort(key=lambda part: part.first)
        return layers

    def _place(self, path: pathlib.Path, module: str) -> tuple[int, Module]:
        """The layer that a module belongs to, and its place there."""
        words = canonical_name(module).split(".")
        known = self._modules.get(".".join(words[3:])) if words[:2] == ["model", "layers"] else None
        if known is None:
            names = ", ".join(name.rpartition(".")[2] for name in self._modules)
            raise UnsupportedModelError(
                f"{path}: the target module {module} is not supported; supported: {names} of each layer"
            )
        if not words[2].isdecimal() or int(words[2]) >= self._spec.num_layers:
            raise ModelError(f"{path}: the model has no {module}: it has {self._spec.num_layers} layers")
        return int(words[2]), known

    def _part(
        self, path: pathlib.Path, module: str, place: Module, spec: LoraSpec, tensors: dict[str, torch.Tensor]
    ) -> LoraPart:
        rank = spec.rank(module)
        for which, shape in (("a", (rank, place.inputs)), ("b", (place.out, rank))):
            if which not in tensors:
                raise ModelError(f"{path} has no tensor {TENSOR_PREFIX}{module}.lora_{which.upper()}.weight")
            if tuple(tensors[which].shape) != shape:
                found = list(tensors[which].shape)
                raise WrongShapeError(f"{path}: lora_{which.upper()} of {module} is {found}; it should be {list(shape)}")
        a = tensors["a"].to(device=self._device, dtype=self._dtype, copy=True)
        b = (tensors["b"].float() * spec.scaling(module)).T.contiguous().to(device=self._device, dtype=self._dtype)
        return LoraPart(place.first, a, b)


def modules_of(spec: ModelSpec) -> dict[str, Module]:
    """By the name that they have within a layer."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "self_attn.q_proj": Module("qkv", 0, q_size, hidden),
        "self_attn.k_proj": Module("qkv", q_size, kv_size, hidden),
        "self_attn.v_proj": Module("qkv", q_size + kv_size, kv_size, hidden),
        "self_attn.o_proj": Module("output", 0, hidden, q_size),
        "mlp.gate_proj": Module("gate_up", 0, inner, hidden),
        "mlp.up_proj": Module("gate_up", inner, inner, hidden),
        "mlp.down_proj": Module("down", 0, hidden, inner),
    }


def _by_module(path: pathlib.Path, stored: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The two tensors of each module. Any other tensor is refused by name."""
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name in stored.keys():  # noqa: SIM118 - not a dict
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None or not name.startswith(TENSOR_PREFIX):
            raise UnsupportedModelError(f"{path}: the tensor {name} is not supported")
        module = name.removeprefix(TENSOR_PREFIX).removesuffix(end)
        modules.setdefault(module, {})[_ENDS[end]] = stored.get_tensor(name)
    return modules


def lora_batch(
    rows: Sequence[Row], token_starts: NDArray[np.int64], outputs: Callable[[], list[tuple[int, int]]]
) -> LoraBatch | None:
    """None if no row has an adapter. `token_starts` is where each row's tokens begin, and where the last ends; `outputs` tells
    of each group of outputs its row and how many they are, in order."""
    if not any(row.sequence.adapter is not None for row in rows):
        return None
    adapters = [_packed(row.sequence.adapter) for row in rows]
    return LoraBatch(
        tokens=_spans(zip(adapters, np.diff(token_starts).tolist(), strict=True)),
        outputs=_spans((adapters[row], count) for row, count in outputs()),
    )


def _packed(adapter: LoadedAdapter | None) -> PackedAdapter | None:
    assert adapter is None or isinstance(adapter, RunnerAdapter)
    return None if adapter is None else adapter.packed


def _spans(groups: Iterable[tuple[PackedAdapter | None, int]]) -> LoraSpans:
    """Neighbours with the same adapter become one."""
    spans: list[LoraSpan] = []
    end = 0
    for adapter, count in groups:
        begin, end = end, end + count
        if adapter is None:
            continue
        if spans and spans[-1].end == begin and spans[-1].adapter is adapter:
            begin = spans.pop().begin
        spans.append(LoraSpan(begin, end, adapter))
    return tuple(spans)
