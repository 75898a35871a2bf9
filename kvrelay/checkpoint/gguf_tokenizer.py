"""A GGUF file's vocabulary as a `tokenizers` tokenizer: byte-level BPE, cut up the way the file's `pre` names.

How text is cut into words before merging is not in the file, only its name is; each name here is one tokenizer of the field.
"""

from __future__ import annotations

from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kvrelay.checkpoint.gguf import Metadata
from kvrelay.errors import ModelError, UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4  # token types; all others are ordinary pieces

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class _Cutting(msgspec.Struct, frozen=True, kw_only=True):
    """How one named pre-tokenizer works."""

    words: str | None = None  # a pattern of its own instead of GPT-2's
    single_digits: bool = False
    ignore_merges: bool = False  # a word that is a token is not merged up to
    normalise: bool = False  # to NFC
    add_bos: bool = False  # where the file does not say


_CUTTINGS = {
    "gpt-2": _Cutting(),
    "smollm": _Cutting(single_digits=True),
    "llama-bpe": _Cutting(words=_LLAMA3_WORDS, ignore_merges=True, add_bos=True),
    "qwen2": _Cutting(words=_QWEN2_WORDS, normalise=True),
}


def build_tokenizer(metadata: Metadata) -> tokenizers.Tokenizer:
    """The tokenizer of the file; saved with `save`, it is a tokenizer.json like any other."""
    kind = metadata.required("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{metadata.path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2 (byte-level BPE)"
        )
    cutting = _cutting(metadata)
    tokens = metadata.list_of(str, "tokenizer.ggml.tokens")
    tokenizer = tokenizers.Tokenizer(_bpe(metadata, tokens, cutting))
    if cutting.normalise:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(cutting))
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, metadata, tokens)
    add_bos = metadata.optional("tokenizer.ggml.add_bos_token", bool)
    if cutting.add_bos if add_bos is None else add_bos:
        bos_id = metadata.required("tokenizer.ggml.bos_token_id", int)
        bos = token_of(metadata, tokens, bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])
    return tokenizer


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """What tokenizer_config.json says."""
    tokens = metadata.list_of(str, "tokenizer.ggml.tokens")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.optional(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is not None:
            settings[f"{name}_token"] = token_of(metadata, tokens, token_id)
    settings["model_max_length"] = metadata.required(".context_length", int)
    template = metadata.optional("tokenizer.chat_template", str)
    if template is not None:
        settings["chat_template"] = template
    return settings


def token_of(metadata: Metadata, tokens: list[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"{metadata.path}: special token {token_id} is outside the vocabulary of {len(tokens)}")
    return tokens[token_id]


def _cutting(metadata: Metadata) -> _Cutting:
    name = metadata.optional("tokenizer.ggml.pre", str)
    if name not in _CUTTINGS:
        supported = ", ".join(_CUTTINGS)
        raise UnsupportedModelError(f"{metadata.path}: tokenizer.ggml.pre {name!r} is not supported; supported: {supported}")
    return _CUTTINGS[name]


def _bpe(metadata: Metadata, tokens: list[str], cutting: _Cutting) -> models.BPE:
    vocabulary = {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}  # of equal tokens the first wins
    merges = [merge.partition(" ") for merge in metadata.list_of(str, "tokenizer.ggml.merges")]
    try:
        return models.BPE(
            vocab=vocabulary, merges=[(left, right) for left, _, right in merges], ignore_merges=cutting.ignore_merges
        )
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{metadata.path}: vocabulary and merges do not fit: {error}") from error


def _pre_tokenizers(cutting: _Cutting) -> list[pre_tokenizers.PreTokenizer]:
    chain: list[pre_tokenizers.PreTokenizer] = []
    if cutting.single_digits:
        chain.append(pre_tokenizers.Digits(individual_digits=True))
    if cutting.words is not None:
        chain.append(pre_tokenizers.Split(Regex(cutting.words), behavior="isolated"))
    return [*chain, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cutting.words is None)]


def _add_special_tokens(tokenizer: tokenizers.Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    types = metadata.list_of(int, "tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ModelError(f"{metadata.path}: {len(tokens)} tokens, but {len(types)} entries in tokenizer.ggml.token_type")
    pairs = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED])
