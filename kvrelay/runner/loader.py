"""From a checkpoint folder to a model in memory.

Safetensors files are mapped, not read: a tensor's bytes come in when the model takes it, are converted to the wanted dtype
and device, packed, and dropped. So the weights exist once, plus the tensors of the layer being built. What a GGUF file has in
blocks stays so where the kernels can compute with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, assert_never

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.checkpoint.vision_spec import VisionSpec
from kvrelay.config import WeightsOption
from kvrelay.errors import MissingTensorError, ModelError, WrongShapeError
from kvrelay.kernels.base import Kernels, Quantised
from kvrelay.kernels.fp8 import FP8, dequantise, quantise
from kvrelay.kernels.ranks import ALONE, Ranks
from kvrelay.log import Log
from kvrelay.models.layers import WeightSource
from kvrelay.models.registry import Model, model_class
from kvrelay.models.vision import VISION_PREFIX, VisionTower
from kvrelay.models.vision_towers import make_tower
from kvrelay.progress import Progress
from kvrelay.runner.quantised import BlockFile, Int8Source
from kvrelay.runner.ranks.shares import RankShare, RankSource

WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_log = Log("loader")


def load_model(
    folder: pathlib.Path,
    spec: ModelSpec,
    *,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    load: Literal["auto", "dummy"],
    progress: Progress,
    weights: WeightsOption = "auto",
    max_positions: int | None = None,
    ranks: Ranks = ALONE,
    contents: bool = True,
    announce: bool = True,
) -> Model:
    """`load="dummy"` makes deterministic random weights and reads no file. `max_positions` bounds the rotary table, for a
    model that will be run with a shorter context than its own. Of several `ranks`, the share of one. With fp8 `weights`,
    those of linear layers that are not in fp8 yet are quantised one by one. Without `contents`, matrices are shapes alone
    (`Kernels.pack`). What was found is logged unless it has been before (`announce`)."""
    source: CheckpointSource | DummySource
    if load == "dummy":
        source = DummySource(device, dtype, progress, contents=contents)
    else:
        formats = kernels.quantised_formats if weights == "auto" else frozenset[str]()
        source = CheckpointSource(folder, device, dtype, progress, formats, contents=contents)
    progress.start("loading weights" if load == "auto" else "making random weights", _num_tensors(spec), unit="tensors")
    try:
        positions = min(max_positions or spec.max_position_embeddings, spec.max_position_embeddings)
        build = model_class(spec.architecture)
        precise = _in_precision(source, weights)
        if ranks.num_ranks == 1:
            model = build(spec, kernels, precise, device=device, max_positions=positions)
        else:
            share = RankShare(spec, ranks.rank, ranks.num_ranks)
            model = build(share.spec, kernels, RankSource(share, precise), device=device, max_positions=positions, ranks=ranks)
    finally:
        progress.done()
    if announce:
        source.report()
    if announce and ranks.rank == 0:
        source.finish(spec)
    return model


def _in_precision(source: WeightSource, weights: WeightsOption) -> WeightSource:
    match weights:
        case "auto" | "float32":
            return source
        case "int8":
            _log.info("weights are rounded to int8: tokens may differ from the checkpoint's")
            return Int8Source(source)
        case "fp8":
            return Fp8Source(source)
        case _:
            assert_never(weights)


def load_tower(
    folder: pathlib.Path,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load: Literal["auto", "dummy"] = "auto",
    progress: Progress,
) -> VisionTower:
    """The vision tower of a model that takes images, and nothing of its text model."""
    assert spec.vision is not None, "the model takes no images"
    source: CheckpointSource | DummySource
    source = DummySource(device, dtype, progress) if load == "dummy" else CheckpointSource(folder, device, dtype, progress)
    progress.start("loading vision weights", _num_vision_tensors(spec.vision), unit="tensors")
    try:
        tower = make_tower(spec.vision, source)
    finally:
        progress.done()
    source.finish(spec, vision=True)
    return tower


class CheckpointSource:
    """Hands out the tensors of a folder's safetensors files. Each one is found once, by name, in one file."""

    def __init__(
        self,
        folder: pathlib.Path,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
        formats: frozenset[str] = frozenset(),
        *,
        contents: bool = True,
    ) -> None:
        """Matrices in blocks of these formats may be taken as they are. Without `contents`, all are shapes alone."""
        self._contents = contents
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._files: dict[pathlib.Path, Any] = {}  # open safetensors files
        self._where = {canonical_name(name): (path, name) for name, path in self._find_tensors().items()}
        self._blocks = BlockFile(folder, formats, contents=contents)
        self._taken: set[str] = set()
        self._held_bytes: Counter[str] = Counter()  # of matrices, by format
        self._float32_bytes = 0

    def take_quantised(self, shapes: Mapping[str, tuple[int, int]], cut: int = 0) -> list[Quantised] | None:
        found = self._blocks.find(shapes, cut)
        if found is not None:
            assert not shapes.keys() & self._taken, f"{', '.join(shapes)} were taken before"
            self._taken.update(shapes)
            self._progress.advance(len(shapes))
            self._held_bytes[found[0].format] += sum(part.blocks.numel() for part in found)
            self._float32_bytes += sum(4 * math.prod(shape) for shape in shapes.values())
        return found

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight, scale = self.take_linear(name, shape)
        return weight if scale is None else dequantise(weight, scale, self._dtype)

    def take_linear(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self._take(name, shape)
        return weight, self._take_scale(f"{name}_scale", shape[0]) if weight.dtype is FP8 else None

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert name not in self._taken, f"{name} was taken before"
        self._taken.add(name)
        if name not in self._where:
            raise MissingTensorError(f"{self._folder} has no tensor {name}, which should be {_text(shape)}")
        path, name = self._where[name]
        stored = self._open(path)
        if name not in stored.keys():  # noqa: SIM118 - not a dict
            raise MissingTensorError(f"{path.name} has no tensor {name}, although {INDEX_NAME} says so")
        found = tuple(stored.get_slice(name).get_shape())
        if found != shape:
            raise WrongShapeError(f"tensor {name} in {path} is {_text(found)}; the config says {_text(shape)}")
        if len(shape) == 2 and not self._contents:
            self._progress.advance(1)
            return torch.empty(shape, dtype=self._dtype, device="meta")
        tensor: torch.Tensor = stored.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} in {path} holds {tensor.dtype}: quantised weights are not supported")
        self._progress.advance(1)
        if tensor.dim() == 2:
            self._held_bytes["F32"] += 4 * tensor.numel()
            self._float32_bytes += 4 * tensor.numel()
        dtype = FP8 if tensor.dtype is FP8 else self._dtype
        return tensor.to(device=self._device, dtype=dtype, copy=True)  # a copy: the mapped file is let go

    def _take_scale(self, name: str, num_outputs: int) -> torch.Tensor:
        """[outputs], of a tensor in fp8: one for each, or one for all."""
        path, _ = self._where.get(name, (None, name))
        if path is None:
            raise MissingTensorError(f"{self._folder} has no tensor {name}: the weight beside it is in fp8")
        self._taken.add(name)
        scale: torch.Tensor = self._open(path).get_tensor(self._where[name][1])
        if scale.numel() not in (1, num_outputs):
            raise WrongShapeError(
                f"tensor {name} in {path} is {_text(scale.shape)}: scales are read that hold for a tensor or for an output"
            )
        return scale.to(device=self._device, dtype=torch.float32, copy=True).flatten().expand(num_outputs).contiguous()

    def report(self) -> None:
        """Tells, once, what stayed quantised and what did not."""
        if self._held_bytes.keys() - {"F32"}:
            held = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(self._held_bytes.items()))
            _log.info("weights stay quantised", held=held, float32=f"{self._float32_bytes / 2**20:.0f} MiB")

    def finish(self, spec: ModelSpec, *, vision: bool = False) -> None:
        """Closes the files and tells of tensors that no layer took, once. Of a model that takes images either the text model
        has been taken or the tower, and the other does not count."""
        self._files.clear()
        self._blocks.close()
        own = [name for name in self._where if spec.vision is None or name.startswith(VISION_PREFIX) is vision]
        unknown = sorted(name for name in own if name not in self._taken and not _is_harmless(name, spec))
        if unknown:
            _log.warning("tensors of the checkpoint not used", count=len(unknown), first=",".join(unknown[:4]))

    def _find_tensors(self) -> dict[str, pathlib.Path]:
        index = self._folder / INDEX_NAME
        if index.exists():
            return self._read_index(index)
        whole = self._folder / WHOLE_NAME  # some repositories hold the same weights again under other names
        paths = [whole] if whole.exists() else sorted(self._folder.glob("*.safetensors"))
        if not paths:
            others = ", ".join(sorted(path.name for path in self._folder.glob("*.bin"))) or "none"
            raise ModelError(f"{self._folder} has no *.safetensors file (pickled weights, which are not read: {others})")
        return {name: path for path in paths for name in self._open(path).keys()}  # noqa: SIM118 - not a dict

    def _read_index(self, index: pathlib.Path) -> dict[str, pathlib.Path]:
        try:
            names = json.loads(index.read_bytes())["weight_map"]
            where = {str(name): self._folder / pathlib.PurePath(file).name for name, file in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        missing = sorted({path.name for path in where.values() if not path.exists()})
        if missing:
            raise ModelError(f"{self._folder} lacks {', '.join(missing)}, named in {index.name}")
        return where

    def _open(self, path: pathlib.Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        return self._files[path]


class DummySource:
    """Random tensors, a function of name and shape alone, scaled so that activations neither vanish nor explode."""

    def __init__(self, device: torch.device, dtype: torch.dtype, progress: Progress, *, contents: bool = True) -> None:
        """Without `contents`, matrices are shapes alone."""
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._contents = contents

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._progress.advance(1)
        if len(shape) == 2 and not self._contents:
            return torch.empty(shape, dtype=self._dtype, device="meta")
        if len(shape) == 1:
            fill = 1.0 if name.endswith(".weight") else 0.0  # a norm's, else a bias
            return torch.full(shape, fill, device=self._device, dtype=self._dtype)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        scale = 1.0 / math.sqrt(math.prod(shape[1:]))
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        return tensor.uniform_(-scale * math.sqrt(3.0), scale * math.sqrt(3.0), generator=generator)

    def take_quantised(self, shapes: Mapping[str, tuple[int, int]], cut: int = 0) -> list[Quantised] | None:
        return None

    def report(self) -> None:
        """Random weights are floats."""

    def take_linear(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.take(name, shape), None

    def finish(self, spec: ModelSpec, *, vision: bool = False) -> None:
        """Nothing is open."""


class Fp8Source:
    """Implements `WeightSource`: weights of linear layers in fp8, whatever they are in another source. At no time does more
    than one of them exist in both precisions."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._source.take(name, shape)

    def take_linear(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, scale = self._source.take_linear(name, shape)
        return quantise(weight) if scale is None else (weight, scale)

    def take_quantised(self, shapes: Mapping[str, tuple[int, int]], cut: int = 0) -> None:
        return None


def canonical_name(name: str) -> str:
    """Models that take images have been saved with the text model and the tower side by side, and with the tower inside."""
    for prefix, ours in (("model.language_model.", "model."), ("model.visual.", VISION_PREFIX)):
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _num_tensors(spec: ModelSpec) -> int:
    """How many tensors a model of this spec takes."""
    per_layer = 9 + 3 * spec.attention_bias + spec.output_bias + 3 * spec.mlp_bias + 2 * spec.qk_norm
    return spec.num_layers * per_layer + 2 + (not spec.tie_word_embeddings)


def _num_vision_tensors(spec: VisionSpec) -> int:
    """How many tensors a tower of this spec takes."""
    around = {"qwen2_vl": 7, "qwen2_5_vl": 6, "qwen3_vl": 9 + 6 * spec.num_deepstack}
    return 12 * spec.depth + around[spec.kind]


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Tensors that older tools store although they follow from the config or from another tensor."""
    if name.endswith((".input_scale", ".k_scale", ".v_scale")):  # of activations and KV, which get scales of their own
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings)


def _text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
