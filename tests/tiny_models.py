"""Tiny random checkpoints in Hugging Face layout, made by transformers itself: what "correct" is measured against.

Each kind is made once per test session, always with the same weights. Every folder also has a real byte-level BPE
tokenizer and a chat template, so a server can serve it.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers
import torch
import transformers
from quantised_blocks import quantised_checkpoint
from scratch import scratch_folder
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    '{"name": "value", "count": 12, "list": [1, 2, 3]}',
    "def main():\n    return 0\n",
]
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far apart logits, so that greedy choices are no ties
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def _llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SHAPE, **changes}))


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def _mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**_SHAPE, "sliding_window": None, "head_dim": 16}))


def _qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SHAPE))


def _qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_SHAPE, "head_dim": 24}))


_MAKERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama-untied": lambda: _llama(tie_word_embeddings=False),
    "llama-bias": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: _llama(**_rope("linear", factor=4.0)),
    "llama-llama3": lambda: _llama(
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    ),
    "llama-yarn": lambda: _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
NAMES = tuple(_MAKERS)
_BY_KV_HEADS: dict[str, Callable[[], Any]] = {  # to be split among ranks; 3 cannot be split evenly
    "kv1": lambda: _llama(num_key_value_heads=1),
    "kv2": lambda: _llama(num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "kv3": lambda: _llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=3),
    "kv8": lambda: _llama(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False),
}
_TO_QUANTISE: dict[str, Callable[[], Any]] = {  # shapes of whole blocks
    "blocks-32": lambda: _llama(hidden_size=64, intermediate_size=96),
    "blocks-256": lambda: _llama(hidden_size=256, intermediate_size=256, tie_word_embeddings=False),
}
_FORMATS = {
    "blocks-32": {"attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q4_1", "attn_output": "Q4_0", "token_embd": "Q8_0"},
    "blocks-256": {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q4_K", "token_embd": "Q6_K"},
}  # of all others the first; what is taken together and differs, as values do here from queries, becomes float32
QUANTISED_NAMES = tuple(_TO_QUANTISE)
_ALL_MAKERS = _MAKERS | _BY_KV_HEADS | _TO_QUANTISE
_SEEDS = {
    name: first + index
    for first, makers in ((0, _MAKERS), (1000, _BY_KV_HEADS), (2000, _TO_QUANTISE))
    for index, name in enumerate(sorted(makers))
}


@functools.cache
def tiny_model(name: str) -> pathlib.Path:
    """The folder of one kind of tiny checkpoint."""
    folder = session_folder() / name
    if name not in QUANTISED_NAMES:
        _write_model(name, folder)
        return folder
    _write_model(name, folder.with_suffix(".float32"))
    formats = _FORMATS[name]
    others = next(iter(formats.values()))
    quantised_checkpoint(folder.with_suffix(".float32"), folder, lambda tensor: formats.get(tensor.split(".")[-2], others))
    return folder


def _write_model(name: str, folder: pathlib.Path) -> None:
    torch.manual_seed(_SEEDS[name])
    model = _ALL_MAKERS[name]().float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # transformers makes biases 0 and norms 1, which would hide their loss
                parameter.add_(torch.randn_like(parameter) * 0.2 if "norm" in parameter_name else torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)


@functools.cache
def reference_model(name: str) -> Any:
    """transformers' own model of the same checkpoint, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32).eval()


def write_tokenizer(folder: pathlib.Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


@functools.cache
def session_folder() -> pathlib.Path:
    return scratch_folder("kvrelay-tiny-")
