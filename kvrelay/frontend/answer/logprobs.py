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
    """Of one choice: four parallel lists that grow. `take` hands out what was added since the last time."""

    __slots__ = ("_num_top", "_offset", "_offsets", "_probabilities", "_tokenizer", "_tokens", "_top")

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        self._reset()

    def _reset(self) -> None:
        self._tokens: list[str] = []
        self._probabilities: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token: int, entry: TokenLogprobs | None) -> None:
        """`entry` is None for the first token of a prompt, which nothing predicts."""
        text = self._tokenizer.token_text(token)
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        if entry is None:
            self._probabilities.append(None)
            self._top.append(None)
            return
        self._probabilities.append(finite(entry.logprob))
        top = {self._tokenizer.token_text(other): finite(logprob) for other, logprob in entry.top[: self._num_top]}
        top.setdefault(text, finite(entry.logprob))  # OpenAI always lists the chosen token, so there may be one more
        self._top.append(top)

    def add_prompt(self, prompt: Sequence[int], entries: Sequence[TokenLogprobs | None] | None) -> None:
        for place, token in enumerate(prompt):
            self.add(token, None if entries is None else entries[place])

    def take(self) -> CompletionLogprobs:
        taken = CompletionLogprobs(
            tokens=self._tokens,
            token_logprobs=self._probabilities,
            top_logprobs=self._top if self._num_top else None,
            text_offset=self._offsets,
        )
        self._reset()
        return taken


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
    own = {"logprob": finite(entry.logprob), "rank": None, "decoded_token": tokenizer.token_text(token)}
    found.setdefault(str(token), own)
    return found
