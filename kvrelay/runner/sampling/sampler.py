"""Chooses the next tokens of a step.

1. `prepare` reads the sequences: parameters, random numbers, token counts, grammar masks. It belongs to the launch, so what
   happens to a sequence afterwards does not matter.
2. `finish` turns the logits into results. It reads no sequence.

On a GPU most steps need no `finish`: where every row takes one token and reports nothing besides, `choose` has the device
choose it as part of the launch, and `results` reads what it chose. `finish` is left for rows that looked at too few candidates.

The random number of an output token is `uniform(seed, sample, position)`, so a request gives the same tokens in any batch and
on any worker. Rows that sample several tokens (a prompt with n > 1) are computed once and drawn from several times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.interfaces import Row, RowFailure, RowResult, SequenceView, StepPlan
from kvrelay.media.placeholders import is_placeholder
from kvrelay.runner.batch import LogitLayout
from kvrelay.runner.sampling.draw import NOT_RESOLVED, NOT_USABLE, Draws, Filters, draw, draw_once, greedy, likeliest
from kvrelay.runner.sampling.edits import EditState, LogitEdits
from kvrelay.runner.sampling.logprobs import best_logprobs, named_logprobs, token_logprobs
from kvrelay.sampling import uniform
from kvrelay.wire.serving import TokenLogprobs

_NO_LOGITS = RowFailure("the model gave no usable logits: every token is impossible, or a number is not finite")


@dataclass(slots=True)
class _Wanted:
    """One row of the plan that samples."""

    plan_row: int
    place: int  # among `Prepared.sampled`
    samples: int
    num_top: int | None  # logprobs: alternatives beside each token; None reports nothing
    named: list[int]  # the alternatives, if they are not to be the likeliest


@dataclass(slots=True)
class _PromptTargets:
    """One row of the plan that reports prompt logprobs."""

    plan_row: int
    first_logits_row: int
    tokens: list[int]
    num_top: int


@dataclass(slots=True)
class _Candidates:
    """One row of the plan that asks for its most likely next tokens."""

    plan_row: int
    place: int  # among `Prepared.sampled`
    count: int


@dataclass(slots=True)
class Prepared:
    """Everything `finish` needs besides the logits."""

    num_plan_rows: int
    sampled: list[int] = field(default_factory=list)  # rows of the logits that tokens are chosen from: places count these
    wanted: list[_Wanted] = field(default_factory=list)
    prompts: list[_PromptTargets] = field(default_factory=list)
    candidates: list[_Candidates] = field(default_factory=list)
    edits: LogitEdits = field(default_factory=LogitEdits)
    failures: dict[int, RowFailure] = field(default_factory=dict)  # by place
    greedy_rows: list[int] = field(default_factory=list)  # indexes of `wanted`
    drawn_rows: list[int] = field(default_factory=list)  # indexes of `wanted`
    filters: Filters | None = None  # of drawn_rows
    draws: Draws | None = None  # from drawn_rows

    @property
    def takes_one_each(self) -> bool:
        """Whether each row that samples takes one token and reports nothing besides."""
        if self.prompts or self.candidates or self.failures or not self.wanted:
            return False
        return all(one.samples == 1 and one.num_top is None for one in self.wanted)

    @property
    def is_certain(self) -> bool:
        """Whether `choose` needs no second look at the logits: no row sorts them."""
        return self.filters is None or not self.filters.sorts.any()


class Sampler:
    """Holds what must be remembered of sequences between steps (in `EditState`) and nothing else."""

    def __init__(self, state: EditState) -> None:
        self._state = state

    @property
    def num_known_sequences(self) -> int:
        return len(self._state)

    def forget(self, keys: list[int]) -> None:
        self._state.forget(keys)

    def prepare(self, plan: StepPlan, layout: LogitLayout) -> Prepared:
        prepared = Prepared(num_plan_rows=len(plan.rows))
        rows = plan.rows
        for plan_row, first, count in layout.prompts:
            prepared.prompts.append(_prompt_targets(rows[plan_row], plan_row, first, count, self._state.image_token_id))
        sampled: list[tuple[int, SequenceView]] = []
        prepared.sampled = [logits_row for _, logits_row in layout.sampled]
        for place, (plan_row, _) in enumerate(layout.sampled):
            row = rows[plan_row]
            if row.candidates:
                prepared.candidates.append(_Candidates(plan_row, place, row.candidates))
                continue
            sampled.append((place, row.sequence))
            group = prepared.greedy_rows if row.sequence.params.greedy else prepared.drawn_rows
            group.append(len(prepared.wanted))
            params = row.sequence.params
            prepared.wanted.append(_Wanted(plan_row, place, row.samples, params.logprobs, params.logprob_token_ids))
        if prepared.drawn_rows:
            drawn = [rows[prepared.wanted[index].plan_row] for index in prepared.drawn_rows]
            prepared.filters, prepared.draws = _filters(drawn), _draws(drawn)
        prepared.edits, prepared.failures = self._state.prepare(sampled)
        return prepared

    def choose(self, logits: torch.Tensor, prepared: Prepared, best: torch.Tensor | None) -> torch.Tensor:
        """The token of each entry of `wanted` where each takes one; on the logits' device, without waiting for it. NOT_USABLE
        where the logits allow no choice, NOT_RESOLVED where `finish` must look again. `best` are the likeliest of all rows of
        the logits, where they are known already. The logits stay as they are."""
        assert prepared.takes_one_each
        if prepared.edits:
            logits, best = _of_rows(logits, prepared.sampled).to(torch.float32, copy=True), None
            prepared.edits.apply(logits)
        elif best is None or len(best) != len(prepared.sampled):
            logits, best = _of_rows(logits, prepared.sampled), None
        tokens = likeliest(logits) if best is None else best
        if not prepared.drawn_rows:
            return tokens
        assert prepared.filters is not None
        assert prepared.draws is not None
        drawn = draw_once(_rows(logits, prepared, prepared.drawn_rows).float(), prepared.filters, prepared.draws)
        if len(drawn) < len(tokens):
            rows = torch.tensor(prepared.drawn_rows).to(logits.device, non_blocking=True)
            drawn = tokens.index_copy(0, rows, drawn)
        return torch.where(tokens >= 0, drawn, NOT_USABLE)

    def results(self, tokens: list[int], prepared: Prepared) -> list[RowResult]:
        """What `choose` chose, once it is known, and all of it is resolved."""
        assert NOT_RESOLVED not in tokens
        if len(tokens) == prepared.num_plan_rows:
            results = [RowResult(tokens=[token]) for token in tokens]
        else:
            results = [RowResult(tokens=[]) for _ in range(prepared.num_plan_rows)]
            for one, token in zip(prepared.wanted, tokens, strict=True):
                results[one.plan_row].tokens = [token]
        if NOT_USABLE in tokens:
            for result in results:
                if result.tokens == [NOT_USABLE]:
                    result.tokens, result.failure = [], _NO_LOGITS
        return results

    def finish(self, logits: torch.Tensor, prepared: Prepared) -> list[RowResult]:
        """Consumes the logits: they are edited in place. In float32, whatever their dtype; of a long prompt's, few at once."""
        results = [RowResult(tokens=[]) for _ in range(prepared.num_plan_rows)]
        _report_prompts(logits, prepared.prompts, results)
        logits = _of_rows(logits, prepared.sampled).float()
        _report_candidates(logits, prepared.candidates, results)
        if not prepared.wanted:
            return results
        reported = [index for index, one in enumerate(prepared.wanted) if one.num_top is not None]
        original = logits[[prepared.wanted[index].place for index in reported]] if reported else None
        prepared.edits.apply(logits)
        tokens = self._choose(logits, prepared)
        for one, chosen in zip(prepared.wanted, tokens, strict=True):
            failure = prepared.failures.get(one.place) or (None if chosen is not None else _NO_LOGITS)
            results[one.plan_row].failure = failure
            results[one.plan_row].tokens = [] if failure or chosen is None else chosen
        if original is not None:
            _report_samples(original, [prepared.wanted[index] for index in reported], results)
        return results

    def _choose(self, logits: torch.Tensor, prepared: Prepared) -> list[list[int] | None]:
        """Tokens per entry of `wanted`; None where the logits allow no choice."""
        chosen: list[list[int] | None] = [None] * len(prepared.wanted)
        if prepared.greedy_rows:
            best = greedy(_rows(logits, prepared, prepared.greedy_rows))
            for index, token in zip(prepared.greedy_rows, best, strict=True):
                chosen[index] = None if token is None else [token] * prepared.wanted[index].samples
        if prepared.drawn_rows:
            assert prepared.filters is not None
            assert prepared.draws is not None
            rows = _rows(logits, prepared, prepared.drawn_rows)
            usable = torch.isfinite(rows.amax(dim=-1)).tolist()
            drawn = draw(rows, prepared.filters, prepared.draws).tolist()
            first = 0
            for index, is_usable in zip(prepared.drawn_rows, usable, strict=True):
                last = first + prepared.wanted[index].samples
                chosen[index] = drawn[first:last] if is_usable else None
                first = last
        return chosen


def _of_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, dtype=torch.int64).to(logits.device, non_blocking=True)]


def _rows(logits: torch.Tensor, prepared: Prepared, indexes: list[int]) -> torch.Tensor:
    return _of_rows(logits, [prepared.wanted[index].place for index in indexes])


def _filters(rows: list[Row]) -> Filters:
    params = [row.sequence.params for row in rows]
    return Filters(
        temperature=np.array([one.temperature for one in params], dtype=np.float32),
        top_k=np.array([one.top_k for one in params], dtype=np.int64),
        top_p=np.array([one.top_p for one in params], dtype=np.float64),
        min_p=np.array([one.min_p for one in params], dtype=np.float32),
    )


def _draws(rows: list[Row]) -> Draws:
    uniforms: list[float] = []
    for row in rows:
        sequence = row.sequence
        position = row.start + row.count - sequence.num_prompt_tokens
        seed, sample = sequence.params.seed, sequence.sample
        uniforms.extend(uniform(seed, sample + index, position) for index in range(row.samples))
    places: NDArray[np.int64] = np.repeat(np.arange(len(rows)), [row.samples for row in rows])
    return Draws(rows=places, uniforms=np.array(uniforms, dtype=np.float64))


def _prompt_targets(row: Row, plan_row: int, first: int, count: int, image_token_id: int | None) -> _PromptTargets:
    tokens = list(row.sequence.tokens[row.start + 1 : row.start + 1 + count])
    if image_token_id is not None:
        tokens = [image_token_id if is_placeholder(token) else token for token in tokens]
    return _PromptTargets(plan_row, first, tokens, row.sequence.params.prompt_logprobs or 0)


def _report_prompts(logits: torch.Tensor, prompts: list[_PromptTargets], results: list[RowResult]) -> None:
    for one in prompts:
        rows = logits[one.first_logits_row : one.first_logits_row + len(one.tokens)]
        results[one.plan_row].prompt_logprobs = token_logprobs(rows, one.tokens, [one.num_top] * len(one.tokens))


def _report_candidates(logits: torch.Tensor, wanted: list[_Candidates], results: list[RowResult]) -> None:
    """Of the model's own distribution: nothing edits the logits of a beam search."""
    if not wanted:
        return
    rows = _of_rows(logits, [one.place for one in wanted])
    found = best_logprobs(rows, max(one.count for one in wanted))
    for one, candidates in zip(wanted, found, strict=True):
        if candidates is None:
            results[one.plan_row].failure = _NO_LOGITS
        else:
            results[one.plan_row].candidates = candidates[: one.count]


def _report_samples(original: torch.Tensor, wanted: list[_Wanted], results: list[RowResult]) -> None:
    """`original` has a row of unedited logits for each of `wanted`."""
    places: list[int] = []
    tokens: list[int] = []
    num_top: list[int] = []
    for place, one in enumerate(wanted):
        chosen = results[one.plan_row].tokens
        places += [place] * len(chosen)
        tokens += chosen
        num_top += [one.num_top or 0] * len(chosen)
    if not tokens:
        return
    rows = original if places == list(range(original.shape[0])) else original[places]
    found = iter(token_logprobs(rows, tokens, num_top))
    for place, one in enumerate(wanted):
        chosen = results[one.plan_row].tokens
        logprobs: list[TokenLogprobs] = [next(found) for _ in chosen]
        if one.named:
            top = named_logprobs(original[place], one.named)
            logprobs = [TokenLogprobs(each.logprob, top, each.rank) for each in logprobs]
        results[one.plan_row].logprobs = logprobs if chosen else None
