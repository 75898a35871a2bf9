"""A GGUF file becomes the checkpoint it was made from."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from gguf_files import F32, gguf_of_checkpoint, interleaved, write_gguf
from safetensors.numpy import load_file
from tiny_models import tiny_model
from tokenizers import Tokenizer

from kvrelay.checkpoint.convert import convert, deinterleaved
from kvrelay.checkpoint.gguf_config import llama3_divisors
from kvrelay.checkpoint.spec import read_spec
from kvrelay.errors import ModelError, UnsupportedModelError
from kvrelay.progress import Silent

ROUND_TRIPS = [("llama", "llama"), ("llama-untied", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
TEXTS = ["The capital of France", "x = {1: 'two'}\n\n  12345", "<|im_start|>user\nHello<|im_end|>\n", "日本 🙂"]


def converted(source: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(source, folder, Silent())
    return folder


@pytest.mark.parametrize(("name", "architecture"), ROUND_TRIPS)
def test_round_trip(name: str, architecture: str, tmp_path: pathlib.Path) -> None:
    original = tiny_model(name)
    folder = converted(gguf_of_checkpoint(original, tmp_path / "m.gguf", architecture), tmp_path)
    before, after = load_file(original / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        np.testing.assert_array_equal(after[tensor], values, err_msg=tensor)
    assert read_spec(folder) == read_spec(original)


def test_tokenizer_and_template_survive(tmp_path: pathlib.Path) -> None:
    original = tiny_model("llama")
    folder = converted(gguf_of_checkpoint(original, tmp_path / "m.gguf", "llama"), tmp_path)
    ours, theirs = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (folder, original))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ours.encode(TEXTS[2]).ids, skip_special_tokens=True) == "user\nHello\n"
    before, after = (json.loads((place / "tokenizer_config.json").read_text()) for place in (original, folder))
    for key in ("chat_template", "bos_token", "eos_token"):
        assert after[key] == before[key]


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_deinterleaving_undoes_interleaving(shape: tuple[int, ...]) -> None:
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    mixed = interleaved(rows, 3)
    assert not np.array_equal(mixed, rows)
    np.testing.assert_array_equal(deinterleaved(mixed, 3), rows)


def test_a_turn_may_have_an_end_of_its_own(tmp_path: pathlib.Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2}
    folder = converted(gguf_of_checkpoint(tiny_model("llama"), tmp_path / "m.gguf", "llama", **changes), tmp_path)
    assert read_spec(folder).eos_token_ids == (2, 1)


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [0]), (False, [])])
def test_beginning_of_text_is_added_where_the_file_says(add_bos: bool, expected: list[int], tmp_path: pathlib.Path) -> None:
    changes = {"tokenizer.ggml.add_bos_token": add_bos}
    folder = converted(gguf_of_checkpoint(tiny_model("llama"), tmp_path / "m.gguf", "llama", **changes), tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("").ids == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "we'll pay 1234 now", ["we", "'ll", "Ġpay", "Ġ1234", "Ġnow"]),
        ("smollm", "pay 1234 now", ["pay", "Ġ", "1", "2", "3", "4", "Ġnow"]),
        ("llama-bpe", "WE'LL pay 1234 now\n\n!", ["WE", "'LL", "Ġpay", "Ġ", "123", "4", "Ġnow", "ĊĊ", "!"]),
        ("qwen2", "WE'LL pay 1234 now", ["WE", "'LL", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġnow"]),
    ],
)
def test_words_are_cut_as_the_name_says(pre: str, text: str, words: list[str], tmp_path: pathlib.Path) -> None:
    changes = {"tokenizer.ggml.pre": pre}
    folder = converted(gguf_of_checkpoint(tiny_model("llama"), tmp_path / "m.gguf", "llama", **changes), tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised(factor: float, tmp_path: pathlib.Path) -> None:
    divisors = llama3_divisors(10000.0, 8, factor).astype("<f4")
    path = add_tensor(tmp_path, "rope_freqs.weight", divisors)
    rope = read_spec(converted(path, tmp_path)).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("llama3", factor, 8192)


def test_unknown_frequency_factors_are_refused(tmp_path: pathlib.Path) -> None:
    path = add_tensor(tmp_path, "rope_freqs.weight", np.full(4, 1.5, dtype="<f4"))
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight matches no known"):
        converted(path, tmp_path)


def test_an_unknown_tensor_is_refused(tmp_path: pathlib.Path) -> None:
    path = add_tensor(tmp_path, "blk.0.ffn_gate_inp.weight", np.zeros(4, dtype="<f4"))
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.ffn_gate_inp\.weight is not part of any llama model"):
        converted(path, tmp_path)


def add_tensor(tmp_path: pathlib.Path, name: str, values: np.ndarray[Any, Any]) -> pathlib.Path:
    """The tiny Llama with one tensor more, of any size in a small file: the other tensors are not asked for before it."""
    from kvrelay.checkpoint.gguf import GGUFFile

    with GGUFFile(gguf_of_checkpoint(tiny_model("llama"), tmp_path / "plain.gguf", "llama")) as file:
        tensors = {key: (F32, t.shape, file.read(key).tobytes()) for key, t in file.tensors.items()}
        tensors[name] = (F32, values.shape, values.tobytes())
        return write_gguf(tmp_path / "m.gguf", file.metadata, tensors)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"general.architecture": "gemma3"}, UnsupportedModelError, "architecture 'gemma3' is not supported; supported: llama"),
        ({"general.architecture": 3}, ModelError, "general.architecture should be str, is '3'"),
        ({"tokenizer.ggml.model": "llama"}, UnsupportedModelError, "tokenizer.ggml.model 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModelError, "tokenizer.ggml.pre 'tekken' is not supported"),
        ({"tokenizer.ggml.tokens": ["x"] * 321}, ModelError, "321 tokens, but token_embd.weight has 320 rows"),
        ({"tokenizer.ggml.token_type": [1]}, ModelError, "320 tokens, but 1 entries in tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.merges": ["zq zz"]}, ModelError, "vocabulary and merges do not fit"),
        ({"tokenizer.ggml.bos_token_id": 900}, ModelError, "special token 900 is outside the vocabulary of 320"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "a mixture of 8 experts"),
        ({"llama.attention.sliding_window": 16}, UnsupportedModelError, "the window 16 is shorter than the context 256"),
        ({"llama.attention.head_count": "four"}, ModelError, "llama.attention.head_count should be int, is 'four'"),
        ({"llama.rope.dimension_count": 4}, UnsupportedModelError, "llama.rope.dimension_count 4 differs from head size 8"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            UnsupportedModelError,
            "rope scaling 'longrope' is not supported",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[ModelError], message: str, tmp_path: pathlib.Path
) -> None:
    path = gguf_of_checkpoint(tiny_model("llama"), tmp_path / "m.gguf", "llama", **changes)
    with pytest.raises(kind) as caught:
        converted(path, tmp_path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_no_room_on_the_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    path = gguf_of_checkpoint(tiny_model("llama"), tmp_path / "m.gguf", "llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ModelError, match="GB are free"):
        converted(path, tmp_path)
