"""Writes small GGUF files for tests, from the format's description and nothing else."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
Tensor = tuple[int, tuple[int, ...], bytes]  # type, shape in rows-first order, bytes
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}


def write_gguf(
    path: pathlib.Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
) -> pathlib.Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _typed(value)
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, offset)
        offset += len(data) + -len(data) % 32
    body = b"".join(data + bytes(-len(data) % 32) for _, _, data in tensors.values())
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def gguf_of_checkpoint(
    folder: pathlib.Path,
    path: pathlib.Path,
    architecture: str,
    *,
    quantised: Callable[[str, tuple[int, ...], bytes], Tensor] | None = None,
    **changes: Any,
) -> pathlib.Path:
    """The checkpoint of a Hugging Face folder as llama.cpp's converter writes it, in float32 or as `quantised` makes it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        plain, data = _gguf_name(name), values.astype("<f4").tobytes()
        tensors[plain] = (F32, values.shape, data) if quantised is None else quantised(plain, values.shape, data)
    return write_gguf(path, {**_metadata(folder, config, architecture), **changes}, tensors)


def interleaved(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Row i of a head's first half goes to 2 i, row i of its second half to 2 i + 1."""
    out = np.empty_like(weight)
    size = len(weight) // num_heads
    for head in range(num_heads):
        rows = weight[head * size : (head + 1) * size]
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[i]
            out[head * size + 2 * i + 1] = rows[size // 2 + i]
    return out


def _metadata(folder: pathlib.Path, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    hyperparameters = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"]
        if "head_dim" in config
        else config["hidden_size"] // config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{name}": value for name, value in hyperparameters.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": settings["chat_template"],
    }


def _gguf_name(name: str) -> str:
    plain = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in plain:
        return plain[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[rest]}"


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    kind, data = _value(value)
    return struct.pack("<I", kind) + data


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case list():
            elements = [_value(element) for element in value]
            kind = elements[0][0] if elements else 4
            return 9, struct.pack("<IQ", kind, len(elements)) + b"".join(data for _, data in elements)
    raise TypeError(type(value))
