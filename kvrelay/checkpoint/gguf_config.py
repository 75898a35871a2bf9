"""A GGUF file's hyperparameters as a config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvrelay.checkpoint.gguf import GGUFFile, Metadata
from kvrelay.errors import ModelError, UnsupportedModelError

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.3; Llama 3.2
_LLAMA3_SETTINGS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_FACTORS = "rope_freqs.weight"


def model_config(file: GGUFFile, metadata: Metadata) -> dict[str, Any]:
    """Raises for everything that we could not serve exactly."""
    name = metadata.architecture
    if name not in _CLASSES:
        supported = ", ".join(_CLASSES)
        raise UnsupportedModelError(f"{file.path}: GGUF architecture {name!r} is not supported; supported: {supported}")
    _refuse_unsupported(metadata)
    num_heads = metadata.required(".attention.head_count", int)
    hidden_size = metadata.required(".embedding_length", int)
    head_dim = metadata.optional(".attention.key_length", int) or hidden_size // max(1, num_heads)
    _check_heads(metadata, head_dim)
    return {
        "architectures": [_CLASSES[name]],
        "model_type": name,
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.required(".block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.optional(".attention.head_count_kv", int) or num_heads,
        "head_dim": head_dim,
        "intermediate_size": metadata.required(".feed_forward_length", int),
        "vocab_size": _vocab_size(file, metadata),
        "max_position_embeddings": metadata.required(".context_length", int),
        "rms_norm_eps": _shortest(metadata.required(".attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(metadata.optional(".rope.freq_base", float) or 10000.0),
        "rope_scaling": _rope_scaling(file, metadata, head_dim),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.optional("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": metadata.optional("tokenizer.ggml.eos_token_id", int),
        "torch_dtype": "float32",
    }


def _refuse_unsupported(metadata: Metadata) -> None:
    experts = metadata.optional(".expert_count", int)
    if experts:
        raise UnsupportedModelError(f"{metadata.path}: a mixture of {experts} experts is not supported")
    window = metadata.optional(".attention.sliding_window", int)
    context = metadata.required(".context_length", int)
    if window and window < context:
        raise UnsupportedModelError(
            f"{metadata.path}: sliding window attention is not supported: "
            f"the window {window} is shorter than the context {context}"
        )


def _check_heads(metadata: Metadata, head_dim: int) -> None:
    for key in (".rope.dimension_count", ".attention.value_length"):
        found = metadata.optional(key, int)
        if found is not None and found != head_dim:
            raise UnsupportedModelError(
                f"{metadata.path}: {metadata.architecture}{key} {found} differs from head size {head_dim}"
            )


def _vocab_size(file: GGUFFile, metadata: Metadata) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    num_tokens = len(metadata.list_of(str, "tokenizer.ggml.tokens"))
    if num_tokens > embedding.shape[0]:
        raise ModelError(f"{file.path}: {num_tokens} tokens, but token_embd.weight has {embedding.shape[0]} rows")
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, metadata: Metadata, head_dim: int) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, metadata, head_dim)
    kind = metadata.optional(".rope.scaling.type", str) or "none"
    if kind == "none":
        return None
    factor = metadata.required(".rope.scaling.factor", float)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.required(".rope.scaling.original_context_length", int)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")


def _llama3_scaling(file: GGUFFile, metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """GGUF keeps only the divisors that Llama 3's settings lead to, so the settings are found by trying those in use."""
    found = file.read(ROPE_FACTORS).astype(np.float64)
    theta = metadata.optional(".rope.freq_base", float) or 10000.0
    for factor in _LLAMA3_FACTORS:
        expected = llama3_divisors(theta, head_dim, factor)
        if found.shape == expected.shape and np.allclose(found, expected, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SETTINGS}
    raise UnsupportedModelError(f"{file.path}: {ROPE_FACTORS} matches no known Llama 3 scaling; use the safetensors checkpoint")


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    low, high = _LLAMA3_SETTINGS["low_freq_factor"], _LLAMA3_SETTINGS["high_freq_factor"]
    context = _LLAMA3_SETTINGS["original_max_position_embeddings"]
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (context / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < context / high, 1.0, np.where(wavelength > context / low, factor, between))


def _shortest(value: float) -> float:
    """The file stores float32; 1e-05 should not become 9.999999747378752e-06."""
    return float(str(np.float32(value)))
