"""Logprobs in three forms: those of chats and of legacy completions, and vLLM's for prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvrelay.frontend.answer.generation import Step
from kvrelay.frontend.answer.types import CompletionLogprobs, TokenLogprob, TopLogprob
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import TokenLogprobs

_FLOOR = -9999.0  # JSON has no infinity: what OpenAI shows for "impossible"


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _FLOOR


def chat_logprobs(tokenizer: Tokenizer, step: Step, num_top: int | None) -> list[TokenLogprob]:
    """Of the step's token; none if no logprobs are shown (`num_top` is None), or the step has no token."""
    if num_top is None or step.token is None or step.logprobs is None:
        return []
    raw = tokenizer.token_bytes(step.token)
    entry = TokenLogprob(
        token=raw.decode(errors="replace"),
        logprob=finite(step.logprobs.logprob),
        bytes=list(raw),
        top_logprobs=[_top(tokenizer, other, logprob) for other, logprob in step.logprobs.top[:num_top]],
    )
    return [entry]


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token)
    return TopLogprob(token=raw.decode(errors="replace"), logprob=finite(logprob), bytes=list(raw))


class LegacyLogprobs:
    """Of one choice: four parallel lists that grow. `take` hands out what was added since the last time.

    Offsets are places in the choice's text, in characters: there a token begins, or the character of which it is a part. A
    token that the text does not show has the place where the next one begins.
    """

    __slots__ = ("_hides_special", "_num_characters", "_num_top", "_offsets", "_probabilities", "_tokenizer", "_tokens", "_top")

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, hides_special: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hides_special = hides_special
        self._num_characters = 0  # that have begun
        self._reset()

    def _reset(self) -> None:
        self._tokens: list[str] = []
        self._probabilities: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token: int, entry: TokenLogprobs | None) -> None:
        shown = b"" if self._hides_special and token in self._tokenizer.special_ids else self._tokenizer.token_bytes(token)
        self._add(token, entry, shown)

    def add_prompt(self, prompt: Sequence[int], entries: Sequence[TokenLogprobs | None] | None, text: str) -> None:
        """`text` is what is shown of the prompt: special tokens are in it only if its author wrote them."""
        rest = text.encode(errors="replace")
        for place, token in enumerate(prompt):
            shown = _beginning(rest, self._tokenizer.token_bytes(token), is_special=token in self._tokenizer.special_ids)
            self._add(token, None if entries is None else entries[place], shown)
            rest = rest[len(shown) :]
        self._num_characters = len(text)

    def _add(self, token: int, entry: TokenLogprobs | None, shown: bytes) -> None:
        """`entry` is None for the first token of a prompt, which nothing predicts."""
        text = self._tokenizer.token_text(token)
        self._tokens.append(text)
        self._offsets.append(self._num_characters - (bool(shown) and _continues(shown[0])))
        self._num_characters += sum(not _continues(byte) for byte in shown)
        if entry is None:
            self._probabilities.append(None)
            self._top.append(None)
            return
        self._probabilities.append(finite(entry.logprob))
        top = {self._tokenizer.token_text(other): finite(logprob) for other, logprob in entry.top[: self._num_top]}
        top.setdefault(text, finite(entry.logprob))  # OpenAI always lists the chosen token, so there may be one more
        self._top.append(top)

    def take(self) -> CompletionLogprobs:
        taken = CompletionLogprobs(
            tokens=self._tokens,
            token_logprobs=self._probabilities,
            top_logprobs=self._top,
            text_offset=self._offsets,
        )
        self._reset()
        return taken


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def _beginning(rest: bytes, token: bytes, *, is_special: bool) -> bytes:
    """The part of a text's rest that a token stands for."""
    for form in (token, token.removeprefix(b" ")):  # sentence-piece tokenizers write a space before the first word
        if rest.startswith(form):
            return form
    return b"" if is_special else rest[: len(token)]


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's form: per token, an object from token ids to their logprobs and ranks."""
    return [
        None if entry is None else _prompt_entry(tokenizer, token, entry) for token, entry in zip(prompt, entries, strict=True)
    ]


def _prompt_entry(tokenizer: Tokenizer, token: int, entry: TokenLogprobs) -> dict[str, Any]:
    found: dict[str, Any] = {
        str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(other)}
        for rank, (other, logprob) in enumerate(entry.top, start=1)
    }
    own = {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": tokenizer.token_text(token)}
    found.setdefault(str(token), own)
    return found
