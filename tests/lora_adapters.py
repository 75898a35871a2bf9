"""LoRA adapters for the tiny checkpoints, made and computed by PEFT itself: what "correct" is measured against."""

from __future__ import annotations

import copy
import functools
import pathlib
from typing import Any

import torch
import triton_here  # noqa: F401  before PEFT, which imports Triton: later the interpreter could not be chosen any more
from tiny_models import reference_model, session_folder

import peft  # isort: skip

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "queries": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 5, "lora_alpha": 6, "use_rslora": True, "target_modules": ["o_proj", "down_proj", "up_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": r".*\.(k_proj|gate_proj|up_proj)",
        "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 70},
        "alpha_pattern": {"gate_proj": 3, "layers.1.mlp.up_proj": 90},
    },
    "some-layers": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
}


@functools.cache
def adapted_model(model: str, adapter: str) -> Any:
    """PEFT's own model."""
    torch.manual_seed(sorted(ADAPTERS).index(adapter) + 100)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[adapter])
    return peft.get_peft_model(copy.deepcopy(reference_model(model)), config).eval()


@functools.cache
def adapter_folder(model: str, adapter: str) -> pathlib.Path:
    folder = session_folder() / "lora" / model / adapter
    adapted_model(model, adapter).save_pretrained(folder)
    return folder
