"""Adapters that cannot be served are refused, and say why."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import torch
from lora_adapters import adapter_folder
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from kvrelay.checkpoint.lora import CONFIG_NAME, WEIGHTS_NAME, lora_digest, named_folders, read_lora
from kvrelay.checkpoint.spec import read_spec
from kvrelay.errors import ConfigError, ModelError
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.runner.lora import LoraAdapters

MODEL = "llama"
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy, to be spoilt."""
    return pathlib.Path(shutil.copytree(adapter_folder(MODEL, "all"), tmp_path / "adapter"))


def configure(folder: pathlib.Path, **changes: Any) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: pathlib.Path) -> None:
    adapters = LoraAdapters(read_spec(tiny_model(MODEL)), TorchKernels().pack_adapter, torch.device("cpu"), torch.float32)
    adapters.add("x", str(folder), adapters.read(str(folder)))


def test_what_peft_saves_is_loaded(folder: pathlib.Path) -> None:
    load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "LOHA"),
        ("something_new", {"of": "PEFT"}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(folder: pathlib.Path, field: str, value: object) -> None:
    configure(folder, **{field: value})
    with pytest.raises(ModelError, match=field):
        load(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", "lm_head is not supported"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", "no model.layers.7.self_attn.q_proj"),
        (f"{MODULE}.lora_magnitude_vector", "lora_magnitude_vector is not supported"),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(folder: pathlib.Path, name: str, message: str) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    save_file(tensors | {name: torch.zeros(4, 32)}, folder / WEIGHTS_NAME)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_tensors_that_are_missing_or_have_another_rank_are_refused_by_name(folder: pathlib.Path) -> None:
    configure(folder, r=5)
    with pytest.raises(ModelError, match=r"is \[4, \d+\]; it should be \[5, \d+\]"):
        load(folder)
    configure(folder, r=4)
    tensors = load_file(folder / WEIGHTS_NAME)
    del tensors[f"{MODULE}.lora_B.weight"]
    save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(ModelError, match=rf"no tensor {MODULE}\.lora_B\.weight"):
        load(folder)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_file_that_is_missing_or_damaged_is_named(folder: pathlib.Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ModelError, match=name):
        load(folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        load(folder)


def test_the_digest_is_of_what_counts(folder: pathlib.Path) -> None:
    digest = lora_digest(folder)
    configure(folder, lora_dropout=0.5, base_model_name_or_path="elsewhere")
    assert lora_digest(folder) == digest
    configure(folder, lora_alpha=9)
    assert lora_digest(folder) != digest


def test_patterns_match_as_in_peft() -> None:
    spec = read_lora(adapter_folder(MODEL, "patterns"))
    assert spec.rank("model.layers.0.self_attn.k_proj") == 2
    assert spec.rank("model.layers.1.mlp.up_proj") == 70
    assert spec.rank("model.layers.11.mlp.up_proj") == 4
    assert spec.scaling("model.layers.2.mlp.gate_proj") == 3 / 4


def test_options_that_cannot_be_are_refused() -> None:
    assert named_folders(["a=/x", "b = /y=z"]) == {"a": pathlib.Path("/x"), "b": pathlib.Path("/y=z")}
    for entries in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(ConfigError, match="--lora"):
            named_folders(entries)
