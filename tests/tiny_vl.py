"""Tiny vision-language checkpoints with made-up weights, for tests and examples: about a million parameters, made in a blink.

Equal on every machine: each weight is a function of its name. The output is nonsense, but it is sensitive nonsense: the gains
below make attention and images matter so much that patches in another order, wrong positions, or features out of place give
other tokens. All letters are one token, and only printable ASCII and the end can be sampled, so texts can be compared.
"""

from __future__ import annotations

import json
import math
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvrelay.checkpoint.convert import write_float32
from kvrelay.checkpoint.vision_spec import VisionKind

Layout = Literal["hub", "transformers"]
Shape = tuple[int, ...]

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
SPECIAL_IDS = {token: NUM_BYTES + index for index, token in enumerate(SPECIAL_TOKENS)}
IMAGE_TOKEN_ID = SPECIAL_IDS["<|image_pad|>"]
EOS_TOKEN_ID = SPECIAL_IDS["<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ARCHITECTURES: dict[VisionKind, str] = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
}
_WIDTH, _INNER, _NUM_LAYERS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 128, 256, 4, 4, 2, 32
_VISION_WIDTH, _VISION_INNER, _VISION_DEPTH, _VISION_HEADS = 64, 128, 4, 4
_DEEPSTACK_BLOCKS = [0, 1, 2]
_NUM_POSITIONS = 144
_MAX_CONTEXT = 4096
_THETA = 10000.0
_TEXT_GAINS = {"embed_tokens": 0.3, "q_proj": 3.0, "q_norm": 3.0, "o_proj": 4.0, "down_proj": 1.5}
_HEAD_GAIN = 4.0


def make_tiny_vl(folder: pathlib.Path, kind: VisionKind = "qwen3_vl", *, layout: Layout = "hub", seed: int = 7) -> None:
    """Fills `folder`, which may exist. The two layouts are the same model: as published, and as transformers 5 saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(kind, layout))
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_TOKEN_ID, "do_sample": False})
    _write_json(folder / "preprocessor_config.json", _preprocessor(kind, layout))
    _write_tokenizer(folder)
    shapes = dict(_shapes(kind))
    names = {_stored_name(name, kind, layout): name for name in shapes}
    write_float32(
        folder / "model.safetensors",
        {stored: shapes[name] for stored, name in names.items()},
        lambda stored: _weight(names[stored], shapes[names[stored]], seed),
        lambda num_bytes: None,
    )


def _patch_size(kind: VisionKind) -> int:
    return 16 if kind == "qwen3_vl" else 14


def _config(kind: VisionKind, layout: Layout) -> dict[str, Any]:
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "max_position_embeddings": _MAX_CONTEXT,
        "rms_norm_eps": 1e-6,
        "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
        "eos_token_id": EOS_TOKEN_ID,
        "hidden_act": "silu",
    } | ({"head_dim": _HEAD_DIM} if kind == "qwen3_vl" else {})
    rope: dict[str, Any] = (
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True} if kind == "qwen3_vl" else {"mrope_section": [4, 6, 6]}
    )
    if layout == "transformers":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": _THETA, **rope}
    else:
        plain = {"rope_type": "default"} if kind == "qwen3_vl" else {"type": "mrope"}
        text |= {"rope_theta": _THETA, "rope_scaling": {**plain, **rope}}
    nested = layout == "transformers" or kind == "qwen3_vl"
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        **({"text_config": {"model_type": f"{kind}_text", **text}} if nested else text),
        "vision_config": _vision_config(kind),
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": SPECIAL_IDS["<|video_pad|>"],
        "vision_start_token_id": SPECIAL_IDS["<|vision_start|>"],
        "vision_end_token_id": SPECIAL_IDS["<|vision_end|>"],
        "tie_word_embeddings": False,
    }


def _vision_config(kind: VisionKind) -> dict[str, Any]:
    common = {
        "model_type": kind,
        "depth": _VISION_DEPTH,
        "num_heads": _VISION_HEADS,
        "patch_size": _patch_size(kind),
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
    if kind == "qwen2_vl":
        return common | {"embed_dim": _VISION_WIDTH, "mlp_ratio": _VISION_INNER // _VISION_WIDTH, "hidden_size": _WIDTH}
    own = {"hidden_size": _VISION_WIDTH, "intermediate_size": _VISION_INNER, "out_hidden_size": _WIDTH}
    if kind == "qwen2_5_vl":
        return common | own | {"window_size": 56, "fullatt_block_indexes": [1, 3]}
    return common | own | {"num_position_embeddings": _NUM_POSITIONS, "deepstack_visual_indexes": _DEEPSTACK_BLOCKS}


def _preprocessor(kind: VisionKind, layout: Layout) -> dict[str, Any]:
    """Images stay small: at most 64 tokens."""
    least, most = (4096, 65536) if kind == "qwen3_vl" else (3136, 50176)
    sizes = {"min_pixels": least, "max_pixels": most}
    if layout == "transformers" or kind == "qwen3_vl":
        sizes = {"size": {"shortest_edge": least, "longest_edge": most}}  # type: ignore[dict-item]
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind != "qwen3_vl":
        colours = {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
    patches = {"patch_size": _patch_size(kind), "temporal_patch_size": 2, "merge_size": 2}
    return {"image_processor_type": "Qwen2VLImageProcessor", **patches, **colours, **sizes}


def _stored_name(name: str, kind: VisionKind, layout: Layout) -> str:
    """Ours are those of the older families as published."""
    if kind != "qwen3_vl" and layout == "hub":
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _shapes(kind: VisionKind) -> Iterator[tuple[str, Shape]]:
    yield from _text_shapes(kind)
    width, inner, patch = _VISION_WIDTH, _VISION_INNER, _patch_size(kind)
    yield "visual.patch_embed.proj.weight", (width, 3, 2, patch, patch)
    if kind == "qwen3_vl":
        yield "visual.patch_embed.proj.bias", (width,)
        yield "visual.pos_embed.weight", (_NUM_POSITIONS, width)
    for index in range(_VISION_DEPTH):
        block = f"visual.blocks.{index}"
        for norm in ("norm1", "norm2"):
            yield from _norm(f"{block}.{norm}", width, bias=kind != "qwen2_5_vl")
        yield from _affine(f"{block}.attn.qkv", 3 * width, width)
        yield from _affine(f"{block}.attn.proj", width, width)
        for name, out_size, in_size in _mlp(kind, width, inner):
            yield from _affine(f"{block}.mlp.{name}", out_size, in_size)
    joined = 4 * width
    if kind != "qwen3_vl":
        yield from _norm("visual.merger.ln_q", width, bias=kind != "qwen2_5_vl")
        yield from _affine("visual.merger.mlp.0", joined, joined)
        yield from _affine("visual.merger.mlp.2", _WIDTH, joined)
        return
    deepstack = [f"visual.deepstack_merger_list.{index}" for index in range(len(_DEEPSTACK_BLOCKS))]
    for merger in ("visual.merger", *deepstack):
        yield from _norm(f"{merger}.norm", width if merger == "visual.merger" else joined, bias=True)
        yield from _affine(f"{merger}.linear_fc1", joined, joined)
        yield from _affine(f"{merger}.linear_fc2", _WIDTH, joined)


def _mlp(kind: VisionKind, width: int, inner: int) -> list[tuple[str, int, int]]:
    if kind == "qwen2_5_vl":
        return [("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)]
    first, second = ("linear_fc1", "linear_fc2") if kind == "qwen3_vl" else ("fc1", "fc2")
    return [(first, inner, width), (second, width, inner)]


def _text_shapes(kind: VisionKind) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (VOCAB_SIZE, _WIDTH)
    q_width, kv_width = _NUM_HEADS * _HEAD_DIM, _NUM_KV_HEADS * _HEAD_DIM
    for index in range(_NUM_LAYERS):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (_WIDTH,)
        yield f"{layer}.post_attention_layernorm.weight", (_WIDTH,)
        for name, size in (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield f"{layer}.self_attn.{name}.weight", (size, _WIDTH)
            if kind != "qwen3_vl":
                yield f"{layer}.self_attn.{name}.bias", (size,)
        yield f"{layer}.self_attn.o_proj.weight", (_WIDTH, q_width)
        if kind == "qwen3_vl":
            yield f"{layer}.self_attn.q_norm.weight", (_HEAD_DIM,)
            yield f"{layer}.self_attn.k_norm.weight", (_HEAD_DIM,)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}.mlp.{name}.weight", (_INNER, _WIDTH)
        yield f"{layer}.mlp.down_proj.weight", (_WIDTH, _INNER)
    yield "model.norm.weight", (_WIDTH,)
    yield "lm_head.weight", (VOCAB_SIZE, _WIDTH)


def _affine(name: str, out_size: int, in_size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_size, in_size)
    yield f"{name}.bias", (out_size,)


def _norm(name: str, width: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _weight(name: str, shape: Shape, seed: int) -> NDArray[np.float32]:
    """Uniform, so that no machine's logarithm matters, with the variance that keeps activations in range."""
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    values = (2.0 * generator.random(shape) - 1.0) * math.sqrt(3.0)
    layer, kind = name.split(".")[-2:]
    if len(shape) == 1:
        values = 0.1 * values + (1.0 if kind == "weight" else 0.0)
    elif layer not in ("embed_tokens", "pos_embed"):
        values /= math.sqrt(math.prod(shape[1:]))
    if layer == "lm_head":
        values *= _HEAD_GAIN
        values[[token for token in range(VOCAB_SIZE) if token not in _sampled()]] = 0.0
    elif not name.startswith("visual.") and kind == "weight":
        values *= _TEXT_GAINS.get(layer, 1.0)
    return values.astype(np.float32)


def _sampled() -> frozenset[int]:
    """A logit of zero never wins among hundreds, so all other tokens are left out by it."""
    letters = _alphabet()
    return frozenset({letters.index(chr(code)) for code in range(0x21, 0x7F)} | {letters.index("Ġ"), EOS_TOKEN_ID})


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _write_tokenizer(folder: pathlib.Path) -> None:
    """A token per byte, and the special ones."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": _MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True), encoding="utf-8")
