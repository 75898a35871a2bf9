"""From a GGUF file to a folder in Hugging Face layout, once.

Weights are dequantised to float32; those that kernels can keep quantised are written once more, in their blocks, to a file of
their own. Files of type "llama" have the rows of q and k interleaved for another rotary convention
(pairs side by side); ours rotates halves, so they are put back. What a GGUF file can say and we cannot serve is refused by
name. `convert` fills a folder; `fetch.py` makes that atomic and caches it.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.checkpoint.gguf import GGUFFile, Metadata
from kvrelay.checkpoint.gguf_config import ROPE_FACTORS, model_config
from kvrelay.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_settings
from kvrelay.checkpoint.spec import CONFIG_NAME, GENERATION_CONFIG_NAME
from kvrelay.errors import ModelError, UnsupportedModelError
from kvrelay.progress import Progress

CONVERTER_VERSION = 2  # part of the cache key: raise it when the same file would give another folder

BLOCKS_NAME = "quantised.blocks"  # a safetensors file under another name, for others read every safetensors file of a folder
KEPT_FORMATS = frozenset({"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"})

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_EXTRA_LAYER_NAMES = {
    "llama": {},
    "qwen2": {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    "qwen3": {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
}
_DTYPES = {"F32": "<f4", "U8": "u1"}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


Value = TypeVar("Value", np.float32, np.uint8)


class _Source(msgspec.Struct, frozen=True):
    """Where one tensor of the folder comes from."""

    name: str  # in the GGUF file
    interleaved_heads: int | None = None  # rows of so many heads are to be put back in halves


def convert(gguf_path: pathlib.Path, folder: pathlib.Path, progress: Progress) -> None:
    """Writes the files of a checkpoint into `folder`, which exists."""
    with GGUFFile(gguf_path) as file:
        metadata = Metadata(file)
        config = model_config(file, metadata)
        _write_json(folder / CONFIG_NAME, config)
        _write_json(folder / GENERATION_CONFIG_NAME, _generation_config(metadata))
        _write_json(folder / "tokenizer_config.json", tokenizer_settings(metadata))
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
        _write_weights(file, config, folder, progress)


def deinterleaved(weight: npt.NDArray[Value], num_heads: int) -> npt.NDArray[Value]:
    """Rows of each head from (a0, b0, a1, b1, ...) to (a0, a1, ..., b0, b1, ...). Works on biases and on blocks too."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _write_weights(file: GGUFFile, config: dict[str, Any], folder: pathlib.Path, progress: Progress) -> None:
    sources = _sources(file, config)
    tensors = {name: file.tensors[source.name] for name, source in sources.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor.format_name in KEPT_FORMATS and len(tensor.shape) == 2}
    total = sum(4 * tensor.num_elements for tensor in tensors.values()) + sum(tensor.size_bytes for tensor in kept.values())
    free = shutil.disk_usage(folder).free
    if free < total:
        raise ModelError(f"converting {file.path} needs {total / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free")

    def in_order(name: str, values: npt.NDArray[Value]) -> npt.NDArray[Value]:
        heads = sources[name].interleaved_heads
        return values if heads is None else deinterleaved(values, heads)

    progress.start(f"converting {file.path.name}", total, unit="bytes")
    try:
        write_float32(
            folder / "model.safetensors",
            {name: tensor.shape for name, tensor in tensors.items()},
            lambda name: in_order(name, file.read(sources[name].name)),
            progress.advance,
        )
        if kept:
            write_safetensors(
                folder / BLOCKS_NAME,
                {name: ("U8", (tensor.shape[0], tensor.size_bytes // tensor.shape[0])) for name, tensor in kept.items()},
                lambda name: in_order(name, file.read_blocks(sources[name].name)),
                progress.advance,
                {name: tensor.format_name for name, tensor in kept.items()},
            )
    finally:
        progress.done()


def write_float32(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], npt.NDArray[np.float32]],
    written: Callable[[int], None],
) -> None:
    """A safetensors file of float32 tensors."""
    write_safetensors(path, {name: ("F32", shape) for name, shape in shapes.items()}, read, written, {"format": "pt"})


def write_safetensors(
    path: pathlib.Path,
    tensors: Mapping[str, tuple[Literal["F32", "U8"], tuple[int, ...]]],
    read: Callable[[str], npt.NDArray[Value]],
    written: Callable[[int], None],
    metadata: Mapping[str, str],
) -> None:
    """Tensor by tensor, so that a model far larger than memory could be converted:

    header size u64 | header JSON {name: {dtype, shape, data_offsets}} padded to 8 bytes | tensors, back to back

    `read` is asked for each tensor in the order of `tensors`; `written` is told of every tensor's bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (kind, shape) in tensors.items():
        end = offset + np.dtype(_DTYPES[kind]).itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (kind, shape) in tensors.items():
            values = np.ascontiguousarray(read(name), dtype=_DTYPES[kind])
            assert values.shape == shape, f"{name} is {values.shape}, announced as {shape}"
            file.write(values.data)
            written(values.nbytes)


def _sources(file: GGUFFile, config: dict[str, Any]) -> dict[str, _Source]:
    architecture = config["model_type"]
    layer_names = _LAYER_NAMES | _EXTRA_LAYER_NAMES[architecture]
    sources: dict[str, _Source] = {}
    for name in file.tensors:
        layer = _LAYER.fullmatch(name)
        if name in _NAMES:
            sources[_NAMES[name]] = _Source(name)
        elif layer and layer[2] in layer_names:
            heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}.get(layer[2])
            interleaved = config[heads] if heads and architecture == "llama" else None
            sources[f"model.layers.{layer[1]}.{layer_names[layer[2]]}"] = _Source(name, interleaved)
        elif name != ROPE_FACTORS:
            raise UnsupportedModelError(f"{file.path}: tensor {name} is not part of any {architecture} model we know")
    return sources


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """Chat models may end a turn with a token of its own besides the end of text."""
    ids = [metadata.optional(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ids if token is not None))
    config: dict[str, Any] = {"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {}
    bos = metadata.optional("tokenizer.ggml.bos_token_id", int)
    return config if bos is None else config | {"bos_token_id": bos}


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
