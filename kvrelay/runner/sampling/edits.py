"""Changes to logits before a token is chosen: bias, then penalties, then masks (minimum length, bad words, allowed tokens,
grammar).

`EditState.prepare` gathers everything a step needs from the sequences; the `LogitEdits` it returns apply to the logits later
and read no sequence. Work is proportional to the tokens touched, not to the vocabulary; sequences without edits cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.interfaces import RowFailure, SequenceView
from kvrelay.media.placeholders import FIRST_ID
from kvrelay.runner.sampling.grammar import Grammars
from kvrelay.sampling import SamplingParams


class TokenCounts:
    """The distinct tokens of one sequence, and how often each is in its output. Follows the sequence as it grows."""

    def __init__(self, sequence: SequenceView, image_token_id: int | None) -> None:
        tokens = np.array(sequence.tokens[: sequence.num_prompt_tokens], dtype=np.int64)
        if image_token_id is not None:  # what stands for an image in the prompt is in no vocabulary
            tokens[tokens >= FIRST_ID] = image_token_id
        prompt = np.unique(tokens)
        self._size = len(prompt)
        self._ids = np.concatenate([prompt, np.zeros(max(16, self._size), dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._index = {token: index for index, token in enumerate(prompt.tolist())}
        self._num_seen = sequence.num_prompt_tokens

    def update(self, sequence: SequenceView) -> bool:
        """False if the sequence is shorter than it was: then the counts are void."""
        if len(sequence.tokens) < self._num_seen:
            return False
        for token in sequence.tokens[self._num_seen :]:
            index = self._index.get(token)
            if index is None:
                index = self._add(token)
            self._counts[index] += 1.0
        self._num_seen = len(sequence.tokens)
        return True

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._size]

    def _add(self, token: int) -> int:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token
        self._index[token] = self._size
        self._size += 1
        return self._size - 1


@dataclass(slots=True)
class _Penalties:
    """Of one logits row."""

    row: int
    ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    params: SamplingParams


@dataclass(slots=True)
class LogitEdits:
    """What to do to the logits of one step. Rows are rows of the logits."""

    bias: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    penalties: list[_Penalties] = field(default_factory=list)
    banned: list[tuple[int, list[int]]] = field(default_factory=list)
    allowed: list[tuple[int, NDArray[np.bool_]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.bias or self.penalties or self.banned or self.allowed)

    def apply(self, logits: torch.Tensor) -> None:
        """In place."""
        if self.bias:
            rows, ids = _places([(row, list(bias)) for row, bias in self.bias], logits)
            values = [value for _, bias in self.bias for value in bias.values()]
            logits.index_put_((rows, ids), torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)
        if self.penalties:
            _penalise(logits, self.penalties)
        if self.banned:
            logits[_places(self.banned, logits)] = -torch.inf
        if self.allowed:
            together: dict[int, NDArray[np.bool_]] = {}
            for row, flags in self.allowed:
                together[row] = flags & together[row] if row in together else flags
            rows = torch.tensor(list(together), device=logits.device)
            forbidden = torch.from_numpy(~np.stack(list(together.values()))).to(logits.device)
            logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


class EditState:
    """What must be remembered of sequences between steps: token counts and grammar matchers."""

    def __init__(
        self, *, vocab_size: int, eos_token_ids: Iterable[int], grammars: Grammars, image_token_id: int | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self.image_token_id = image_token_id  # counts for every token of an image; None: there are no images
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._counts: dict[int, TokenCounts] = {}

    def __len__(self) -> int:
        return max(len(self._counts), len(self._grammars))

    def forget(self, keys: list[int]) -> None:
        self._grammars.forget(keys)
        for key in keys:
            self._counts.pop(key, None)

    def prepare(self, sampled: list[tuple[int, SequenceView]]) -> tuple[LogitEdits, dict[int, RowFailure]]:
        """`sampled` is (logits row, sequence). Also tells, by logits row, which sequences cannot go on and why."""
        edits, failures = LogitEdits(), {}
        guided: list[tuple[int, SequenceView]] = []
        for row, sequence in sampled:
            params = sequence.params
            if params.logit_bias:
                odd = next((token for token in params.logit_bias if not 0 <= token < self._vocab_size), None)
                if odd is not None:
                    failures[row] = RowFailure(f"logit_bias names token {odd}, but the vocabulary has {self._vocab_size}")
                    continue
                edits.bias.append((row, params.logit_bias))
            if params.penalised:
                counts = self._counted(sequence)
                edits.penalties.append(_Penalties(row, counts.ids.copy(), counts.counts.copy(), params))
            if params.allowed_token_ids:
                edits.allowed.append((row, self._only(params.allowed_token_ids)))
            if params.bad_tokens and (last := _last_of_bad_words(sequence)):
                edits.banned.append((row, last))
            if params.grammar is not None:
                guided.append((row, sequence))
            elif self._too_short(sequence):
                edits.banned.append((row, self._end_tokens(params)))
        if guided:
            self._prepare_grammars(guided, edits, failures)
        return edits, failures

    def _only(self, tokens: list[int]) -> NDArray[np.bool_]:
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[tokens] = True
        return allowed

    def _counted(self, sequence: SequenceView) -> TokenCounts:
        counts = self._counts.get(sequence.key)
        if counts is None or not counts.update(sequence):
            counts = self._counts[sequence.key] = TokenCounts(sequence, self.image_token_id)
            counts.update(sequence)
        return counts

    def _prepare_grammars(
        self, guided: list[tuple[int, SequenceView]], edits: LogitEdits, failures: dict[int, RowFailure]
    ) -> None:
        answers = self._grammars.allowed([sequence for _, sequence in guided])
        for (row, sequence), allowed in zip(guided, answers, strict=True):
            if isinstance(allowed, str):
                failures[row] = RowFailure(allowed, param="response_format")
                continue
            if self._too_short(sequence):
                longer = allowed.copy()
                longer[self._end_tokens(sequence.params)] = False
                # A grammar that can only end here does, whatever min_tokens says: no token could follow.
                allowed = longer if longer.any() else allowed
            edits.allowed.append((row, allowed))

    def _too_short(self, sequence: SequenceView) -> bool:
        return len(sequence.tokens) - sequence.num_prompt_tokens < sequence.params.min_tokens

    def _end_tokens(self, params: SamplingParams) -> list[int]:
        ends = {*self._eos_token_ids, *params.stop_token_ids}
        return sorted(token for token in ends if 0 <= token < self._vocab_size)


def _last_of_bad_words(sequence: SequenceView) -> list[int]:
    """Tokens that would complete a bad word of which the output so far ends in all others."""
    output = sequence.tokens[sequence.num_prompt_tokens :]
    found: set[int] = set()
    for *before, last in sequence.params.bad_tokens:
        if not before or list(output[-len(before) :]) == before:
            found.add(last)
    return sorted(found)


def _places(wanted: list[tuple[int, list[int]]], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.repeat([row for row, _ in wanted], [len(ids) for _, ids in wanted]).astype(np.int64)
    ids = np.array([token for _, ids in wanted for token in ids], dtype=np.int64)
    return torch.from_numpy(rows).to(like.device), torch.from_numpy(ids).to(like.device)


def _penalise(logits: torch.Tensor, penalties: list[_Penalties]) -> None:
    """Repetition over prompt and output, as Hugging Face does it; then frequency and presence over output, as OpenAI does."""
    lengths = [len(one.ids) for one in penalties]

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(logits.device)

    places = (
        torch.from_numpy(np.repeat([one.row for one in penalties], lengths).astype(np.int64)).to(logits.device),
        torch.from_numpy(np.concatenate([one.ids for one in penalties])).to(logits.device),
    )
    counts = torch.from_numpy(np.concatenate([one.counts for one in penalties])).to(logits.device)
    values = logits[places]
    repetition = spread([one.params.repetition_penalty for one in penalties])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([one.params.frequency_penalty for one in penalties]) * counts
    values -= spread([one.params.presence_penalty for one in penalties]) * (counts > 0)
    logits[places] = values
