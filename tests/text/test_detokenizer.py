"""Pieces of text, one per token, are exactly the decoded text; stop strings are found wherever tokens cut them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.media.placeholders import placeholder_ids
from kvrelay.sampling import SamplingParams
from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.stop import StopSearch
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import CORPUS, folder_of

BYTE_LEVEL = Tokenizer.load(folder_of("byte_level"))
SENTENCE_PIECE = Tokenizer.load(folder_of("sentence_piece"))
WORD_PIECE = Tokenizer.load(folder_of("word_piece"))
ALL = [BYTE_LEVEL, SENTENCE_PIECE, WORD_PIECE]
FIRST_BYTE_TOKEN = 3  # of the sentence-piece vocabulary


def pieces_of(tokenizer: Tokenizer, tokens: list[int], params: SamplingParams, prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, params, prompt or [])
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40), st.booleans())
def test_pieces_of_random_byte_level_tokens_are_the_decoded_text(tokens: list[int], skip: bool) -> None:
    pieces = pieces_of(BYTE_LEVEL, tokens, SamplingParams(skip_special_tokens=skip))
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(st.lists(st.integers(FIRST_BYTE_TOKEN + 256, SENTENCE_PIECE.vocab_size - 1), max_size=20), st.text(max_size=8))
def test_pieces_of_random_sentence_piece_tokens_are_the_decoded_text(words: list[int], text: str) -> None:
    """Bytes come as whole characters, as a model that was trained on text writes them."""
    raw = [FIRST_BYTE_TOKEN + byte for byte in text.encode()]
    for tokens in ([*words, *raw], [*raw, *words], [*words, 2, *raw, *words]):
        assert "".join(pieces_of(SENTENCE_PIECE, tokens, SamplingParams())) == SENTENCE_PIECE.decode(
            tokens, skip_special_tokens=True
        )


@given(st.lists(st.integers(0, WORD_PIECE.vocab_size - 1), max_size=30))
def test_pieces_of_other_tokenizers_are_the_decoded_text(tokens: list[int]) -> None:
    assert "".join(pieces_of(WORD_PIECE, tokens, SamplingParams())) == WORD_PIECE.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.integers(0, SENTENCE_PIECE.vocab_size - 1), max_size=30))
def test_any_bytes_give_some_text(tokens: list[int]) -> None:
    text = "".join(pieces_of(SENTENCE_PIECE, tokens, SamplingParams(skip_special_tokens=False)))
    assert len(text) <= len("".join(map(SENTENCE_PIECE.token_text, tokens))) + len(tokens)
    text.encode()


@pytest.mark.parametrize("tokenizer", ALL)
@pytest.mark.parametrize("text", CORPUS[:2])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_text_goes_on_where_the_prompt_ended(tokenizer: Tokenizer, text: str, cut: int) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    prompt, output = tokens[:cut], tokens[cut:]
    pieces = pieces_of(tokenizer, output, SamplingParams(), prompt)
    assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(tokens)


def test_one_token_one_piece_and_half_characters_wait() -> None:
    tokens = BYTE_LEVEL.encode("a 東", add_special_tokens=False)
    pieces = pieces_of(BYTE_LEVEL, tokens, SamplingParams())
    assert len(pieces) == len(tokens) + 1
    assert pieces[-1] == ""
    assert pieces[-2].endswith("東")
    assert all("�" not in piece for piece in pieces)


def test_a_character_that_never_ends_is_shown_as_replacement() -> None:
    tokens = BYTE_LEVEL.encode("🙂", add_special_tokens=False)[:-1]
    assert "".join(pieces_of(BYTE_LEVEL, tokens, SamplingParams())) == "�"


def test_special_tokens_are_skipped_unless_asked_for_but_markup_stays() -> None:
    tokens = [*BYTE_LEVEL.encode("<tool_call>one</tool_call>"), 2]
    assert "".join(pieces_of(BYTE_LEVEL, tokens, SamplingParams())) == "<tool_call>one</tool_call>"
    shown = "".join(pieces_of(BYTE_LEVEL, tokens, SamplingParams(skip_special_tokens=False)))
    assert shown == "<tool_call>one</tool_call><|im_end|>"


def naive_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    matches = [
        (end, start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
        for end in [start + len(stop)]
    ]
    return None if not matches else (min(matches)[1], min(matches)[0])


@settings(max_examples=400)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_stop_search_in_pieces_equals_search_in_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    search = StopSearch(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        shown += search.push(piece)
        if search.stopped is not None:
            break
    else:
        shown += search.flush()
    text = "".join(pieces)
    match = naive_stop(text, stops)
    if match is None:
        assert (shown, search.stopped) == (text, None)
    else:
        start, end = match
        assert (shown, search.stopped) == (text[: end if include else start], text[start:end])


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=10),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    search = StopSearch(stops, include_stop=False)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += search.push(piece)
        if search.stopped is not None:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_string_over_several_tokens_reports_the_tokens_to_keep() -> None:
    tokens = BYTE_LEVEL.encode("one two three four", add_special_tokens=False)
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=["o th"]))
    shown = ""
    for token in tokens:
        shown += detokenizer.push(token)
        if detokenizer.stopped is not None:
            break
    kept = detokenizer.num_tokens
    assert shown + detokenizer.flush() == "one tw"
    assert detokenizer.stopped == "o th"
    assert kept < len(tokens)
    assert "o th" in BYTE_LEVEL.decode(tokens[:kept])
    assert "o th" not in BYTE_LEVEL.decode(tokens[: kept - 1])


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    tokens = BYTE_LEVEL.encode("a a a a a a", add_special_tokens=False)
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=["a"], min_tokens=4, max_tokens=16))
    shown = ""
    for token in tokens:
        shown += detokenizer.push(token)
        if detokenizer.stopped is not None:
            break
    assert detokenizer.num_tokens == 4
    assert shown == BYTE_LEVEL.decode(tokens[:4])[:-1]


def test_a_match_that_ended_before_min_tokens_is_not_found_later() -> None:
    search = StopSearch(["ab", "abcd"], include_stop=False)
    assert search.push("ab", armed=False) == ""
    assert search.push("x", armed=True) == "abx"
    assert search.stopped is None


@pytest.mark.parametrize("tokenizer", ALL)
def test_a_prompt_that_ends_in_a_image_does_not_matter(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(CORPUS[0], add_special_tokens=False)
    prompt = [*tokens, *placeholder_ids("a", 9)]
    assert "".join(pieces_of(tokenizer, tokens, SamplingParams(), prompt)).strip() == CORPUS[0]
