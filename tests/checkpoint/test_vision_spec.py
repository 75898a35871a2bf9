"""What is read of models that take images, in the layouts that are about, and what is refused, by name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from vision_models import KINDS, Kind, reference_vl, tiny_vl

from kvrelay.checkpoint.spec import ModelSpec, read_spec
from kvrelay.errors import MissingTensorError, ModelError, UnsupportedModelError
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.progress import Silent
from kvrelay.runner.loader import load_model, load_tower


def config_of(kind: Kind, layout: Any = "hub") -> dict[str, Any]:
    return json.loads((tiny_vl(kind, layout) / "config.json").read_text())


def spec_of(folder: pathlib.Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_transformers(kind: Kind) -> None:
    spec, model = read_spec(tiny_vl(kind)), reference_vl(kind)
    text, vision = model.config.text_config, model.config.vision_config
    assert spec.vision is not None
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (text.hidden_size, text.num_hidden_layers, text.vocab_size)
    assert spec.rms_norm_eps == text.rms_norm_eps
    assert spec.rope.theta == text.rope_parameters["rope_theta"]
    assert list(spec.rope.mrope_section or ()) == text.rope_parameters["mrope_section"]
    assert spec.vision.image_token_id == model.config.image_token_id
    assert spec.vision.depth == vision.depth
    assert spec.vision.out_hidden_size == text.hidden_size
    first = model.model.visual.blocks[0].mlp
    inner = {"qwen3_vl": "linear_fc1", "qwen2_5_vl": "up_proj", "qwen2_vl": "fc1"}[kind]
    assert (spec.vision.intermediate_size, spec.vision.hidden_size) == tuple(getattr(first, inner).weight.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind: Kind, tmp_path: pathlib.Path) -> None:
    config = config_of(kind, "transformers")
    del config["text_config"]["rms_norm_eps"], config["text_config"]["rope_parameters"]["rope_theta"]
    spec, defaults = spec_of(tmp_path, config), type(reference_vl(kind).config.text_config)()
    assert spec.rms_norm_eps == defaults.rms_norm_eps
    assert spec.rope.theta == defaults.rope_parameters["rope_theta"]


def test_tied_embeddings_and_the_end_may_stand_inside_or_outside(tmp_path: pathlib.Path) -> None:
    config = config_of("qwen3_vl")
    config["tie_word_embeddings"] = True
    assert spec_of(tmp_path, config).tie_word_embeddings
    config["tie_word_embeddings"] = False
    config["text_config"]["tie_word_embeddings"] = True
    del config["text_config"]["eos_token_id"]
    config["eos_token_id"] = [7]
    spec = spec_of(tmp_path, config)
    assert spec.tie_word_embeddings
    assert spec.eos_token_ids == (7,)


def _changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    inner = config
    *parents, last = path.split(".")
    for name in parents:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return config


REFUSED: list[tuple[Kind, str, Any, type[ModelError], str]] = [
    ("qwen3_vl", "vision_config", ..., ModelError, "vision_config"),
    ("qwen3_vl", "image_token_id", ..., ModelError, "image_token_id"),
    ("qwen3_vl", "image_token_id", 264, ModelError, "image_token_id 264 is outside"),
    ("qwen3_vl", "quantization_config", {"quant_method": "fp8"}, UnsupportedModelError, "quantization_config"),
    ("qwen3_vl", "text_config.rope_scaling.mrope_section", ..., ModelError, "mrope_section"),
    ("qwen3_vl", "text_config.rope_scaling.mrope_section", [6, 5, 4], ModelError, "does not add up"),
    ("qwen3_vl", "text_config.rope_scaling.mrope_interleaved", False, UnsupportedModelError, "mrope_interleaved"),
    ("qwen2_vl", "rope_scaling.mrope_interleaved", True, UnsupportedModelError, "mrope_interleaved"),
    ("qwen3_vl", "vision_config.hidden_act", "relu", UnsupportedModelError, "hidden_act"),
    ("qwen3_vl", "vision_config.in_channels", 4, UnsupportedModelError, "4 colours"),
    ("qwen3_vl", "vision_config.num_heads", 3, ModelError, "3 heads"),
    ("qwen3_vl", "vision_config.num_position_embeddings", 145, ModelError, "must be a square"),
    ("qwen3_vl", "vision_config.deepstack_visual_indexes", [2, 1], ModelError, "rising order"),
    ("qwen3_vl", "vision_config.deepstack_visual_indexes", [4], ModelError, "no block 4"),
    ("qwen3_vl", "vision_config.deepstack_visual_indexes", [0, 1, 2, 3], ModelError, "need more layers"),
    ("qwen3_vl", "vision_config.out_hidden_size", 64, ModelError, "do not fit"),
    ("qwen3_vl", "vision_config.rope_parameters", {"rope_type": "yarn"}, UnsupportedModelError, "rope_parameters"),
    ("qwen2_5_vl", "vision_config.window_size", 20, ModelError, "window_size 20"),
    ("qwen2_5_vl", "vision_config.fullatt_block_indexes", ..., ModelError, "fullatt_block_indexes"),
    ("qwen2_vl", "vision_config.embed_dim", ..., ModelError, "embed_dim"),
    ("qwen2_vl", "vision_config.depth", 0, ModelError, "depth must be positive"),
]


@pytest.mark.parametrize(("kind", "path", "value", "error", "text"), REFUSED)
def test_refusals(kind: Kind, path: str, value: Any, error: type[ModelError], text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(error, match=text):
        spec_of(tmp_path, _changed(config_of(kind), path, value))


def test_each_half_of_a_checkpoint_loads_without_the_other(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker that encodes reads no text weight, and one that does not encode no vision weight."""
    import torch
    from safetensors.torch import load_file, save_file

    source = tiny_vl("qwen3_vl")
    spec = read_spec(source)
    tensors = load_file(source / "model.safetensors")
    halves = {"vision": tmp_path / "vision", "text": tmp_path / "text"}
    for name, folder in halves.items():
        folder.mkdir()
        own = {key: value for key, value in tensors.items() if key.startswith("model.visual.") is (name == "vision")}
        save_file(own, folder / "model.safetensors")
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "progress": Silent()}
    load_tower(halves["vision"], spec, **settings)
    load_model(halves["text"], spec, kernels=TorchKernels(), load="auto", **settings)
    with pytest.raises(MissingTensorError, match=r"visual\.patch_embed"):
        load_tower(halves["text"], spec, **settings)
    with pytest.raises(MissingTensorError, match=r"model\.embed_tokens"):
        load_model(halves["vision"], spec, kernels=TorchKernels(), load="auto", **settings)
    load_tower(source, spec, **settings)
    load_model(source, spec, kernels=TorchKernels(), load="auto", **settings)
    assert "not used" not in capsys.readouterr().err
