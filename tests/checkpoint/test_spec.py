"""What is read from config.json, in both layouts, and what is refused, by name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import pytest
from tiny_models import NAMES, reference_model, tiny_model

from kvrelay.checkpoint.rope import RopeSpec
from kvrelay.checkpoint.spec import SUPPORTED_ARCHITECTURES, ModelSpec, fingerprint, read_spec
from kvrelay.errors import ModelError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}


def spec_of(folder: pathlib.Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(folder)


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_transformers(name: str) -> None:
    spec, config = read_spec(tiny_model(name)), reference_model(name).config
    assert spec.architecture == config.architectures[0]
    assert (spec.hidden_size, spec.num_layers) == (config.hidden_size, config.num_hidden_layers)
    assert (spec.num_heads, spec.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    layer = reference_model(name).model.layers[0]
    assert spec.head_dim == layer.self_attn.head_dim
    assert spec.attention_bias == (layer.self_attn.q_proj.bias is not None)
    assert spec.output_bias == (layer.self_attn.o_proj.bias is not None)
    assert spec.mlp_bias == (layer.mlp.down_proj.bias is not None)
    assert spec.qk_norm == hasattr(layer.self_attn, "q_norm")
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.eos_token_ids == (config.eos_token_id,)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_both_layouts_of_rope_settings_mean_the_same(theta: float, tmp_path: pathlib.Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    base = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    old = spec_of(tmp_path, base | {"rope_theta": theta, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = spec_of(tmp_path, base | {"rope_parameters": {"rope_type": "llama3", "rope_theta": theta, **scaling}})
    assert old == new
    assert old.rope == RopeSpec(
        kind="llama3",
        theta=theta,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    )


def test_oldest_name_of_the_rope_type(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert spec.rope == RopeSpec(kind="linear", theta=500000.0, factor=2.0)


@pytest.mark.parametrize("missing", [None, "absent"])
def test_no_rope_scaling(missing: str | None, tmp_path: pathlib.Path) -> None:
    config = LLAMA if missing else LLAMA | {"rope_scaling": None}
    assert spec_of(tmp_path, config).rope == RopeSpec(theta=500000.0)


def test_what_a_family_implies(tmp_path: pathlib.Path) -> None:
    assert spec_of(tmp_path, LLAMA).head_dim == 16
    assert spec_of(tmp_path, QWEN3).head_dim == 128  # as transformers' default
    assert spec_of(tmp_path, QWEN2).attention_bias
    assert not spec_of(tmp_path, QWEN2 | {"attention_bias": True}).output_bias
    assert not spec_of(tmp_path, MISTRAL | {"attention_bias": True}).attention_bias
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert spec_of(tmp_path, without).num_kv_heads == 4


def test_end_tokens_come_from_both_files(tmp_path: pathlib.Path) -> None:
    assert spec_of(tmp_path, LLAMA, {"eos_token_id": [9, 2, 7]}).eos_token_ids == (9, 2, 7)
    assert spec_of(tmp_path, LLAMA | {"eos_token_id": [5, 6]}, {"eos_token_id": 6}).eos_token_ids == (6, 5)
    assert spec_of(tmp_path, LLAMA | {"eos_token_id": None}, {}).eos_token_ids == ()


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL,
        MISTRAL | {"sliding_window": 512},  # no context is longer
        LLAMA | {"sliding_window": 16},  # a field Llama does not have
        QWEN2 | {"sliding_window": 16, "use_sliding_window": False},
        QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},  # from the third layer on
        QWEN3 | {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_window_that_does_not_matter_is_accepted(config: dict[str, Any], tmp_path: pathlib.Path) -> None:
    assert spec_of(tmp_path, config).num_layers == 2


FP8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}
INT8 = {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}}}


@pytest.mark.parametrize("config", [FP8, {"quant_method": "fp8", "activation_scheme": "static"}], ids=str)
def test_weights_in_fp8_are_accepted(config: dict[str, Any], tmp_path: pathlib.Path) -> None:
    assert spec_of(tmp_path, LLAMA | {"quantization_config": config}).fp8
    assert not spec_of(tmp_path, LLAMA).fp8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
        (LLAMA | {"architectures": []}, "names no architecture (model_type 'llama')"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config (method 'gptq')"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "float 8 by block"),
        (LLAMA | {"quantization_config": FP8 | {"config_groups": {}}}, "weights unknown is not supported"),
        (LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", **INT8}}, "int 8 by channel"),
        (MISTRAL | {"sliding_window": 128}, "sliding_window 128 is shorter than max_position_embeddings 512"),
        (
            {key: value for key, value in MISTRAL.items() if key != "sliding_window"} | {"max_position_embeddings": 32768},
            "sliding_window 4096 is shorter than max_position_embeddings 32768",
        ),
        (QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, "sliding_window 64"),
        (
            QWEN3 | {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window 64",
        ),
        (QWEN3 | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types linear_attention"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_we_do_not_implement_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(tmp_path, config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "Expected `int`, got `str` - at `$.hidden_size`"),
        ({"num_hidden_layers": 0}, "num_layers must be positive, is 0"),
        ({"num_attention_heads": 0}, "num_heads must be positive"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"eos_token_id": 100}, "eos_token_id 100 is outside the vocabulary of 100"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope settings lack factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor must be a positive number, is 'two'"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
    ],
)
def test_a_config_that_makes_no_sense(change: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(tmp_path, LLAMA | change)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_missing_field_is_named(field: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=f"missing required field `{field}`"):
        spec_of(tmp_path, {key: value for key, value in LLAMA.items() if key != field})


def test_missing_and_unreadable_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_spec(tmp_path / "none")
    with pytest.raises(ModelError, match=r"has no config\.json: not a checkpoint"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match=r"config\.json: JSON is malformed"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"architectures": ["\xff"]}')
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path)


def test_fingerprint_changes_with_what_kv_depends_on(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, LLAMA)
    same = spec_of(tmp_path, dict(reversed(LLAMA.items())))
    assert fingerprint(spec, "float32") == fingerprint(same, "float32")
    others = [
        fingerprint(spec, "bfloat16"),
        fingerprint(msgspec.structs.replace(spec, num_layers=3), "float32"),
        fingerprint(msgspec.structs.replace(spec, rope=RopeSpec(theta=1e4)), "float32"),
    ]
    assert len({fingerprint(spec, "float32"), *others}) == 4


def test_kv_size(tmp_path: pathlib.Path) -> None:
    assert spec_of(tmp_path, LLAMA).kv_bytes_per_token(4) == 2 * 2 * 2 * 16 * 4


def test_every_supported_architecture_has_a_model() -> None:
    from kvrelay.models.registry import model_class

    for architecture in SUPPORTED_ARCHITECTURES:
        assert model_class(architecture)
    with pytest.raises(UnsupportedModelError, match="Nonsense"):
        model_class("Nonsense")
