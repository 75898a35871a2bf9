"""What a LoRA adapter is: a folder as PEFT writes it, with `adapter_config.json` and `adapter_model.safetensors`.

Everything that would change the output and that we do not implement is refused here, by name, before a tensor is read. Which
modules an adapter changes its tensors say; the config says by how much.
"""

from __future__ import annotations

import hashlib
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import ConfigError, ModelError, UnsupportedModelError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
TENSOR_PREFIX = "base_model.model."  # PEFT's, before the module's own name

# Which tensors an adapter has follows from some of these; the others are about training, or told for information.
_HARMLESS = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
        "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    )
)  # fmt: skip
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # others change the base model's weights, too

V = TypeVar("V")


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How much an adapter changes each module. Fields have PEFT's names."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def rank(self, module: str) -> int:
        return _of(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        return _of(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def read_lora(folder: pathlib.Path) -> LoraSpec:
    """Raises ModelError, or UnsupportedModelError for what is not implemented."""
    path = folder / CONFIG_NAME
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"{folder} is no LoRA adapter: cannot read {CONFIG_NAME}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error
    _refuse(path, config)
    try:
        spec = msgspec.convert(config, LoraSpec)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from error
    for rank in (spec.r, *spec.rank_pattern.values()):
        if rank < 1:
            raise ModelError(f"{path}: a rank must be at least 1, not {rank}")
    return spec


def _refuse(path: pathlib.Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type {config.get('peft_type')!r} is not supported; supported: LORA")
    known = {*_HARMLESS, *LoraSpec.__struct_fields__, "peft_type", "bias", "init_lora_weights"}
    for name in sorted(set(config) - known):
        if config[name]:
            raise UnsupportedModelError(f"{path}: {name} is not supported")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias {config['bias']!r} is not supported; supported: none")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise UnsupportedModelError(f"{path}: init_lora_weights {start!r} is not supported: it changes the base model too")


def lora_digest(folder: pathlib.Path) -> str:
    """Of all that decides what the adapter computes: equal for adapters that can replace each other."""
    digest = hashlib.blake2b(msgspec.json.encode(read_lora(folder), order="deterministic"), digest_size=16)
    try:
        with (folder / WEIGHTS_NAME).open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"{folder} is no LoRA adapter: cannot read {WEIGHTS_NAME}: {error.strerror}") from error
    return digest.hexdigest()


def named_folders(entries: Sequence[str], flag: str = "--lora") -> dict[str, pathlib.Path]:
    """Of `--lora NAME=PATH`, each once. Raises ConfigError, which names the flag."""
    folders: dict[str, pathlib.Path] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name.strip() and equals and path.strip()):
            raise ConfigError(f"{flag} {entry}: must be NAME=PATH")
        if name.strip() in folders:
            raise ConfigError(f"{flag} {entry}: the name {name.strip()!r} is given twice")
        folders[name.strip()] = pathlib.Path(path.strip()).expanduser()
    return folders


def _of(patterns: Mapping[str, V], module: str, otherwise: V) -> V:
    """The first pattern that is the module's name or the end of it after a dot, as PEFT matches them."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
