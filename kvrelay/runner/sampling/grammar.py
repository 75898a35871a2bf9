"""Grammars at work: which tokens may come next.

A sequence that has a grammar gets a matcher the first time it samples. Before each of its steps the matcher takes the output
tokens committed since, and tells the tokens that may follow. Nothing but the sequence's tokens is needed for that, so a
sequence that arrives with output (moved here, preempted, forked) is simply replayed. A grammar is compiled once and copied
for each sequence that uses it.

The end-of-text tokens are allowed exactly where the grammar accepts; once it can take nothing more, only they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.interfaces import SequenceView
from kvrelay.errors import InvalidRequestError, ModelError
from kvrelay.sampling import Grammar
from kvrelay.text.grammar_check import describe, limits, to_definition

_MOST_COMPILED = 64  # compiled grammars kept for the next request that uses the same


@dataclass(slots=True)
class _Progress:
    """Of one sequence."""

    matcher: llguidance.LLMatcher
    num_consumed: int = 0  # output tokens


class GrammarError(Exception):
    """One sequence cannot go on. Never leaves this package: the runner makes a RowResult.failure of it."""


class Grammars:
    """Matchers of all sequences that have a grammar. The tokenizer is read when the first of them comes."""

    def __init__(
        self, read_tokenizer: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 1
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._num_threads = max(1, num_threads)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._sequences: dict[int, _Progress] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._sequences.pop(key, None)

    def allowed(self, sequences: Sequence[SequenceView]) -> list[NDArray[np.bool_] | str]:
        """For each sequence, which tokens of the vocabulary may come next, or why it cannot go on."""
        matchers: list[llguidance.LLMatcher | str] = [self._advance_or_say(sequence) for sequence in sequences]
        whole = [(matcher, index) for index, matcher in enumerate(matchers) if not isinstance(matcher, str)]
        bits = self._fill(whole, len(matchers))
        answers: list[NDArray[np.bool_] | str] = []
        for index, (sequence, matcher) in enumerate(zip(sequences, matchers, strict=True)):
            if isinstance(matcher, str):
                answers.append(matcher)
            elif matcher.is_error():
                answers.append(describe(_grammar_of(sequence), matcher.get_error()))
            else:
                answers.append(bits[index])
        return answers

    def _fill(self, matchers: list[tuple[llguidance.LLMatcher, int]], count: int) -> NDArray[np.bool_]:
        if not matchers:
            return np.zeros((count, 0), dtype=np.bool_)
        assert self._tokenizer is not None
        words = np.zeros((count, -(-max(self._tokenizer.vocab_size, self._vocab_size) // 32)), dtype=np.uint32)
        num_bytes = words.shape[1] * words.itemsize
        if len(matchers) == 1 or self._num_threads == 1:
            for matcher, index in matchers:
                matcher.unsafe_compute_mask_ptr(words[index].ctypes.data, num_bytes)
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(num_threads=self._num_threads)
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, num_bytes, count)
        flags = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=self._vocab_size)
        return flags.view(np.bool_)

    def _advance_or_say(self, sequence: SequenceView) -> llguidance.LLMatcher | str:
        try:
            return self._advance(sequence)
        except GrammarError as error:
            return str(error)

    def _advance(self, sequence: SequenceView) -> llguidance.LLMatcher:
        """The sequence's matcher after all of its output."""
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        progress = self._sequences.get(sequence.key)
        if progress is None or progress.num_consumed > num_output:
            progress = _Progress(self._compile(_grammar_of(sequence)).deep_copy())
            self._sequences[sequence.key] = progress
        fresh = list(sequence.tokens[sequence.num_prompt_tokens + progress.num_consumed :])
        if not self._consume(progress.matcher, fresh):
            problem = progress.matcher.get_error() or "the output so far does not follow it"
            raise GrammarError(describe(_grammar_of(sequence), problem))
        progress.num_consumed = num_output
        return progress.matcher

    def _consume(self, matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
        """Whether the tokens follow the grammar. Behind its end there may be any number of end-of-text tokens (ignore_eos)."""
        taken = 0 if matcher.is_stopped() else matcher.try_consume_tokens(tokens)
        rest = tokens[taken:]
        if not rest:
            return not matcher.is_error()
        return bool(matcher.is_stopped()) and all(token in self._eos_token_ids for token in rest)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """The matcher of a grammar before any output."""
        known = self._compiled.get(grammar)
        if known is not None:
            self._compiled.move_to_end(grammar)
            return known
        try:
            definition = to_definition(grammar)
        except InvalidRequestError as error:
            raise GrammarError(error.message) from None
        matcher = llguidance.LLMatcher(self._get_tokenizer(), definition, log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(describe(grammar, matcher.get_error()))
        self._compiled[grammar] = matcher
        if len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return matcher

    def _get_tokenizer(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = _make_tokenizer(self._read_tokenizer(), self._vocab_size, self._eos_token_ids)
            except (ModelError, OSError, ValueError) as error:
                raise GrammarError(f"response_format cannot be used: the model's tokenizer is unusable: {error}") from error
        return self._tokenizer


def _make_tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
    eos = eos_token_ids or None
    try:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError:  # the tokenizer knows more tokens than the model: the mask is cut to the model's
        return llguidance.LLTokenizer(text, eos_token=eos)


def _grammar_of(sequence: SequenceView) -> Grammar:
    grammar = sequence.params.grammar
    assert grammar is not None
    return grammar
