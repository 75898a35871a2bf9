"""Whatever the logits say, guided output follows its grammar."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
import tokenizers
import torch
from free_sequences import FreeSequence
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

from kvrelay.runner.sampling.edits import EditState
from kvrelay.runner.sampling.grammar import Grammars
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def read_tokenizer() -> str:
    return (pathlib.Path(tiny_model("llama")) / "tokenizer.json").read_text()


def make_grammars(vocab_size: int = VOCAB_SIZE, num_threads: int = 2) -> Grammars:
    return Grammars(read_tokenizer, vocab_size=vocab_size, eos_token_ids=[EOS_TOKEN_ID], num_threads=num_threads)


def guided(kind: GrammarKind, source: object = "", **params: object) -> FreeSequence:
    text = source if isinstance(source, str) else json.dumps(source)
    sampling = SamplingParams(grammar=Grammar(kind=kind, source=text), max_tokens=200, **params)  # type: ignore[arg-type]
    return FreeSequence(tokens=[10, 11, 12], params=sampling)


def decode(sequence: FreeSequence) -> str:
    tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer())
    return str(tokenizer.decode(sequence.tokens[sequence.num_prompt_tokens :], skip_special_tokens=True))


def generate(state: EditState, sequence: FreeSequence, seed: int, *, spread: float = 3.0, max_tokens: int = 400) -> str:
    """Greedy over random logits; the end of text gains weight over time, so that endless grammars end."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(max_tokens):
        logits = torch.randn(1, VOCAB_SIZE, generator=generator) * spread
        logits[0, EOS_TOKEN_ID] += step
        edits, failures = state.prepare([(0, sequence)])
        assert not failures
        edits.apply(logits)
        sequence.tokens.append(int(logits.argmax()))
        if sequence.tokens[-1] == EOS_TOKEN_ID:
            return decode(sequence)
    raise AssertionError(f"no end after {max_tokens} tokens: {decode(sequence)!r}")


def make_state(grammars: Grammars | None = None) -> EditState:
    return EditState(vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID], grammars=grammars or make_grammars())


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "age", "tags"}
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 150
        and set(value["tags"]) <= {"a", "b"}
        and len(value["tags"]) <= 3
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "source", "follows"),
    [
        (GrammarKind.JSON_SCHEMA, PERSON, is_person),
        (GrammarKind.REGEX, r"(\d{3}-){2}[a-f]+", lambda text: re.fullmatch(r"([0-9]{3}-){2}[a-f]+", text)),
        (GrammarKind.REGEX, "a/b\nc", lambda text: text == "a/b\nc"),
        (GrammarKind.CHOICE, ["yes", "no", 'may "be"\n', "né"], lambda text: text in ("yes", "no", 'may "be"\n', "né")),
        (GrammarKind.CHOICE, [""], lambda text: text == ""),
        (GrammarKind.CHOICE, [f"choice {n}" for n in range(3000)], lambda text: re.fullmatch(r"choice [0-9]{1,4}", text)),
        (GrammarKind.LARK, 'start: "(" start ")" | "x"', lambda text: re.fullmatch(r"\(*x\)*", text)),
    ],
)  # fmt: skip
def test_output_follows_the_grammar_whatever_the_logits(kind: GrammarKind, source: object, follows: object, seed: int) -> None:
    text = generate(make_state(), guided(kind, source), seed)
    assert follows(text), text  # type: ignore[operator]


def test_json_object_gives_an_object() -> None:
    state = make_state()
    for seed in range(3):
        sequence = guided(GrammarKind.JSON_OBJECT)
        text = ""
        for _ in range(300):  # prefers to close what is open, or it would not end
            allowed = make_flags(state, sequence)
            tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer())
            ends = [EOS_TOKEN_ID, *(tokenizer.token_to_id(t) for t in '"}]:0123')]
            logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed + len(sequence.tokens)))
            logits[ends] += 3.0
            sequence.tokens.append(int(logits.masked_fill(~torch.from_numpy(allowed), -torch.inf).argmax()))
            if sequence.tokens[-1] == EOS_TOKEN_ID:
                text = decode(sequence)
                break
        assert isinstance(json.loads(text), dict)


def test_json_cannot_wander_off_into_white_space() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer())
    space, state, sequence = tokenizer.encode(" ").ids[0], make_state(), guided(GrammarKind.JSON_OBJECT)
    sequence.tokens.append(tokenizer.token_to_id("{"))
    assert make_flags(state, sequence)[space]
    sequence.tokens.append(space)
    assert not make_flags(state, sequence)[space]


def make_flags(state: EditState, sequence: FreeSequence) -> np.ndarray:
    edits, failures = state.prepare([(0, sequence)])
    assert not failures
    return edits.allowed[0][1]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), moves=st.lists(st.integers(1, 30), max_size=4))
def test_a_sequence_that_moves_between_workers_goes_on_alike(seed: int, moves: list[int]) -> None:
    """A new worker knows nothing but the tokens: its masks must be those of the old one."""
    state, sequence, moved = make_state(), guided(GrammarKind.JSON_SCHEMA, PERSON), 0
    other = make_state()
    for step in range(60):
        if step in moves:
            other = make_state()
            moved += 1
        mask = make_flags(state, sequence)
        assert np.array_equal(mask, make_flags(other, sequence))
        logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed * 100 + step))
        sequence.tokens.append(int(logits.masked_fill(~torch.from_numpy(mask), -torch.inf).argmax()))
        if sequence.tokens[-1] == EOS_TOKEN_ID:
            break


def test_forks_of_one_prompt_have_a_state_each() -> None:
    state = make_state()
    parent = guided(GrammarKind.CHOICE, ["ab", "cd"])
    tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer())
    a, b, c, d = (tokenizer.token_to_id(letter) for letter in "abcd")
    child = FreeSequence(tokens=[*parent.tokens, c], num_prompt_tokens=3, params=parent.params, sample=1)
    assert {a, c} <= set(np.flatnonzero(make_flags(state, parent)))
    parent.tokens.append(a)
    masks = make_grammars().allowed([parent, child])
    assert [set(np.flatnonzero(mask)) for mask in masks] == [{b}, {d}]
    assert set(np.flatnonzero(make_flags(state, child))) == {d}
    assert set(np.flatnonzero(make_flags(state, parent))) == {b}


def test_a_sequence_that_got_shorter_is_replayed() -> None:
    state, sequence = make_state(), guided(GrammarKind.CHOICE, ["ab", "cd"])
    tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer())
    before = make_flags(state, sequence)
    sequence.tokens += [tokenizer.token_to_id(letter) for letter in "ab"]
    make_flags(state, sequence)
    del sequence.tokens[3:]
    assert np.array_equal(make_flags(state, sequence), before)


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    state, sequence = make_state(), guided(GrammarKind.REGEX, "ab?")
    tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer())
    assert not make_flags(state, sequence)[EOS_TOKEN_ID]
    sequence.tokens.append(tokenizer.token_to_id("a"))
    assert make_flags(state, sequence)[EOS_TOKEN_ID]
    sequence.tokens.append(tokenizer.token_to_id("b"))
    assert np.flatnonzero(make_flags(state, sequence)).tolist() == [EOS_TOKEN_ID]
    sequence.tokens.append(EOS_TOKEN_ID)  # with ignore_eos the sequence goes on
    assert np.flatnonzero(make_flags(state, sequence)).tolist() == [EOS_TOKEN_ID]


def test_min_tokens_delays_the_end_unless_nothing_else_can_follow() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(read_tokenizer())
    sequence = guided(GrammarKind.REGEX, "ab?", min_tokens=10)
    state = make_state()
    sequence.tokens.append(tokenizer.token_to_id("a"))
    assert np.flatnonzero(make_flags(state, sequence)).tolist() == [tokenizer.token_to_id("b")]
    sequence.tokens.append(tokenizer.token_to_id("b"))
    assert np.flatnonzero(make_flags(state, sequence)).tolist() == [EOS_TOKEN_ID]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, {"type": "nonsense"}),
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.CHOICE, []),
        (GrammarKind.LARK, "start: nowhere"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_fails_its_row_alone(kind: GrammarKind, source: object) -> None:
    rows = [(0, guided(kind, source)), (1, guided(GrammarKind.CHOICE, ["a"]))]
    edits, failures = make_state().prepare(rows)
    assert list(failures) == [0]
    assert failures[0].param == "response_format"
    assert "response_format" in failures[0].message
    assert [row for row, _ in edits.allowed] == [1]


def test_output_that_left_the_grammar_fails_its_row() -> None:
    sequence = guided(GrammarKind.CHOICE, ["yes"])
    sequence.tokens.append(50)
    (answer,) = make_grammars().allowed([sequence])
    assert isinstance(answer, str)
    assert "does not follow it" in answer


def test_a_missing_tokenizer_fails_the_row() -> None:
    grammars = Grammars(lambda: pathlib.Path("/nowhere/tokenizer.json").read_text(), vocab_size=10, eos_token_ids=[1])
    (answer,) = grammars.allowed([guided(GrammarKind.CHOICE, ["yes"])])
    assert isinstance(answer, str)
    assert "tokenizer" in answer


def test_masks_have_the_models_vocabulary_also_where_the_tokenizer_has_another() -> None:
    for vocab_size in (VOCAB_SIZE - 30, VOCAB_SIZE, VOCAB_SIZE + 70):
        (mask,) = make_grammars(vocab_size).allowed([guided(GrammarKind.REGEX, "[a-z]+")])
        assert not isinstance(mask, str)
        assert mask.shape == (vocab_size,)
        assert mask.any()
        assert not mask[VOCAB_SIZE:].any()


def test_one_thread_and_many_give_the_same_masks() -> None:
    sequences = [guided(GrammarKind.REGEX, f"[a-{letter}]+") for letter in "bcdefg"]
    one, many = make_grammars(num_threads=1).allowed(sequences), make_grammars(num_threads=2).allowed(sequences)
    assert [np.flatnonzero(mask).tolist() for mask in one] == [np.flatnonzero(mask).tolist() for mask in many]


def test_released_sequences_are_forgotten() -> None:
    grammars = make_grammars()
    sequence = guided(GrammarKind.CHOICE, ["a"])
    grammars.allowed([sequence])
    assert len(grammars) == 1
    grammars.forget([sequence.key, 10**9])
    assert len(grammars) == 0
