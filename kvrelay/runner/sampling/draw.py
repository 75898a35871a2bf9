"""From logits to tokens: greedy choice, and drawing by inverse CDF with a given uniform number.

A row's tokens depend on that row alone, bit for bit, whatever else is in the batch: no reduction here runs over a whole row
in an order that the library may choose by the number of rows (a plain `sum` does). Sums go over fixed chunks, then in float64
from left to right.

The inverse CDF always walks tokens in the order of their ids, also after top_k and top_p, which know them in the order of
their logits. So when logits differ in the last bit (another batch size, another worker), two near-equal tokens that change
rank do not change the draw.

Filters follow vLLM: temperature, then min_p, then top_k, then top_p over what is left. Ties at the edge of top_k go to the
lower id. Sorting a whole vocabulary is slow, so top_k and top_p look at the best few candidates first, and at more of them
only where the edge does not lie strictly inside those.

On a GPU `likeliest` and `draw_once` choose without making the host wait; `draw_once` looks at the first few candidates only,
and says where those were not enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_CHUNK = 64  # tokens summed together
_FEWEST_CANDIDATES = 128
_MORE_CANDIDATES = 8  # times as many on the next attempt
_PIECES = (128, 96, 64, 48, 32)  # of a row, one of which divides most vocabularies
_FEW_ROWS = 128  # up to here an H200 is faster in pieces
NOT_USABLE, NOT_RESOLVED = -1, -2  # in place of tokens that the device chooses


@dataclass(slots=True)
class Filters:
    """How each row is drawn from. All have one entry per row."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]  # 0 is off
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]

    @property
    def sorts(self) -> NDArray[np.bool_]:
        """Which rows need their tokens in the order of their logits."""
        return (self.top_k > 0) | (self.top_p < 1.0)

    def __getitem__(self, rows: NDArray[np.int64]) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(slots=True)
class Draws:
    """The draws asked for: which row each is from, in rising order, and its number in [0, 1)."""

    rows: NDArray[np.int64]
    uniforms: NDArray[np.float64]

    def of(self, rows: NDArray[np.int64]) -> tuple[Draws, NDArray[np.int64]]:
        """Those from `rows`, with row numbers that index `rows`; and which they are of all."""
        place = np.full(int(self.rows.max(initial=0)) + 1, -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        which = np.flatnonzero(place[self.rows] >= 0)
        return Draws(place[self.rows[which]], self.uniforms[which]), which


def greedy(logits: torch.Tensor) -> list[int | None]:
    """The most likely token of each row, the lowest id among equals; None where the largest logit is not finite."""
    if logits.device.type == "cpu":  # an order of magnitude faster than torch.argmax
        rows = logits.numpy()
        best = rows.argmax(axis=1)
        usable = np.isfinite(rows[np.arange(len(best)), best])
        return [token if is_usable else None for token, is_usable in zip(best.tolist(), usable.tolist(), strict=True)]
    tokens = logits.argmax(dim=-1)
    finite = torch.isfinite(logits.gather(1, tokens[:, None])[:, 0])
    return [token if is_usable else None for token, is_usable in zip(tokens.tolist(), finite.tolist(), strict=True)]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """`greedy` without waiting for the device: -1 instead of None."""
    num_rows, vocab_size = logits.shape
    pieces = next((count for count in _PIECES if vocab_size % count == 0), 1)
    if pieces == 1 or num_rows > _FEW_ROWS:
        values, tokens = logits.max(dim=-1)
    else:  # of few long rows a reduction uses little of a GPU
        best, inner = logits.view(num_rows, pieces, -1).max(dim=-1)
        values, piece = best.max(dim=-1)
        tokens = torch.add(inner.gather(1, piece[:, None])[:, 0], piece, alpha=vocab_size // pieces)
    is_finite = values - values == 0  # two kernels, where `isfinite` launches four
    return torch.where(is_finite, tokens, NOT_USABLE)


def draw(logits: torch.Tensor, filters: Filters, draws: Draws) -> torch.Tensor:
    """One token per draw. Rows without a finite logit give an arbitrary token: the caller checks for them."""
    sorting = filters.sorts
    tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=logits.device)
    for chosen, method in ((~sorting, _draw_plain), (sorting, _draw_filtered)):
        if chosen.all():
            return method(logits, filters, draws)
        if chosen.any():
            rows = np.flatnonzero(chosen)
            part, which = draws.of(rows)
            tokens[_to(which, logits)] = method(logits[_to(rows, logits)], filters[rows], part)
    return tokens


def draw_once(logits: torch.Tensor, filters: Filters, draws: Draws) -> torch.Tensor:
    """`draw` without waiting for the device: NOT_RESOLVED where more candidates must be looked at."""
    sorting = filters.sorts
    if not sorting.any():
        return _draw_plain(logits, filters, draws)
    tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=logits.device)
    if not sorting.all():
        rows = np.flatnonzero(~sorting)
        part, which = draws.of(rows)
        tokens[_to(which, logits)] = _draw_plain(logits[_to(rows, logits)], filters[rows], part)
    num_candidates = _first_candidates(filters)
    for count in np.unique(num_candidates[sorting]):
        rows = np.flatnonzero(sorting & (num_candidates == count))
        part, which = draws.of(rows)
        subset = logits if len(rows) == logits.shape[0] else logits[_to(rows, logits)]
        found, resolved = _draw_from_candidates(subset, filters[rows], part, int(count))
        tokens[_to(which, logits)] = torch.where(resolved[_to(part.rows, logits)], found, NOT_RESOLVED)
    return tokens


# Without sorting


def _draw_plain(logits: torch.Tensor, filters: Filters, draws: Draws) -> torch.Tensor:
    return _search_chunked(_weights(logits, filters), draws)


def _weights(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Probabilities up to a factor: 1 for the most likely token. Padded with zeros to whole chunks."""
    num_rows, vocab_size = logits.shape
    padded = -(-vocab_size // _CHUNK) * _CHUNK
    weights = torch.zeros(num_rows, padded, dtype=torch.float32, device=logits.device)
    part = weights[:, :vocab_size]
    torch.sub(logits, logits.amax(dim=-1, keepdim=True), out=part)
    part.div_(_to(filters.temperature, logits)[:, None])
    part.exp_()
    if (filters.min_p > 0.0).any():
        part.masked_fill_(part < _to(filters.min_p, logits)[:, None], 0.0)
    return weights


def _chunk_cdf(weights: torch.Tensor) -> torch.Tensor:
    return weights.view(weights.shape[0], -1, _CHUNK).sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)


def _search_chunked(weights: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Finds the chunk, then the token in it: one pass over the weights and two short searches."""
    rows, uniforms = _to(draws.rows, weights), _to(draws.uniforms, weights)
    cdf = _chunk_cdf(weights)[rows]
    chunk, rest = _search(cdf, uniforms * cdf[:, -1])
    inner_cdf = weights.view(weights.shape[0], -1, _CHUNK)[rows, chunk].cumsum(dim=-1, dtype=torch.float64)
    inner, _ = _search(inner_cdf, rest)
    return chunk * _CHUNK + inner


def _search(cdf: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row, the first index whose cumulative weight exceeds the target, and how far the target lies into it.

    Strictly exceeds: an entry of weight 0 is never found. The target is kept below the total, which rounding may reach."""
    total = cdf[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target[:, None], right=True).clamp_(max=cdf.shape[1] - 1)
    before = torch.where(index > 0, cdf.gather(1, (index - 1).clamp_(min=0)), 0.0)
    return index[:, 0], (target - before[:, 0]).clamp_(min=0.0)


# With sorting


def _draw_filtered(logits: torch.Tensor, filters: Filters, draws: Draws) -> torch.Tensor:
    tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=logits.device)
    num_candidates = _first_candidates(filters)
    pending = np.arange(len(filters.top_k))
    while len(pending):
        unresolved = []
        for count in np.unique(num_candidates[pending]):
            rows = pending[num_candidates[pending] == count]
            part, which = draws.of(rows)
            subset = logits if len(rows) == logits.shape[0] else logits[_to(rows, logits)]
            found, resolved = _draw_from_candidates(subset, filters[rows], part, int(count))
            tokens[_to(which, logits)] = found
            unresolved.append(rows[~resolved.cpu().numpy()])
        pending = np.concatenate(unresolved)
        num_candidates *= _MORE_CANDIDATES
    return tokens


def _first_candidates(filters: Filters) -> NDArray[np.int64]:
    needed = np.maximum(filters.top_k + 1, _FEWEST_CANDIDATES)
    counts: NDArray[np.int64] = 2 ** np.ceil(np.log2(needed)).astype(np.int64)
    return counts


def _draw_from_candidates(
    logits: torch.Tensor, filters: Filters, draws: Draws, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per draw, and per row whether so many candidates were enough (else its tokens mean nothing)."""
    values, ids = best(logits, count)
    weights, alive = _candidate_weights(values, filters)
    keep = _keep_top_p(logits, weights, alive, filters)
    resolved = _resolved(values, weights, keep, vocab_size=logits.shape[1])
    ids, order = ids.sort(dim=-1)
    cdf = torch.where(keep, weights, 0.0).gather(1, order).cumsum(dim=-1, dtype=torch.float64)
    rows = _to(draws.rows, logits)
    cdf = cdf[rows]
    index, _ = _search(cdf, _to(draws.uniforms, logits) * cdf[:, -1])
    return ids[rows, index], resolved


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest logits in falling order with their ids, equal ones by rising id."""
    if count >= logits.shape[1]:
        return logits.sort(dim=-1, descending=True, stable=True)
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _candidate_weights(values: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as in `_weights`, and which candidates min_p and top_k leave: the first so many of each row."""
    weights = (values - values[:, :1]).div_(_to(filters.temperature, values)[:, None]).exp_()
    limit = np.where(filters.top_k > 0, filters.top_k, values.shape[1])
    ranks = torch.arange(values.shape[1], device=values.device)
    alive = (ranks < _to(limit, values)[:, None]) & (weights >= _to(filters.min_p, values)[:, None])
    return weights, alive


def _keep_top_p(logits: torch.Tensor, weights: torch.Tensor, alive: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Of the candidates left, those before which less than top_p of the mass lies."""
    if (filters.top_p >= 1.0).all():
        return alive
    cumulative = torch.where(alive, weights, 0.0).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1].clone()
    if weights.shape[1] < logits.shape[1]:  # tokens beyond the candidates may hold mass too
        is_open = filters.top_p < 1.0
        if logits.device.type == "cpu":  # only a CPU can look without waiting
            is_open &= alive[:, -1].numpy()
        if is_open.any():
            rows = _to(np.flatnonzero(is_open), logits)
            subset = logits if is_open.all() else logits[rows]
            whole = _chunk_cdf(_weights(subset, filters[np.flatnonzero(is_open)]))[:, -1]
            total[rows] = torch.where(alive[rows, -1], whole, total[rows])
    top_p = _to(filters.top_p, logits)
    before = cumulative - weights
    inside = (before < (top_p * total)[:, None]) | (top_p >= 1.0)[:, None]
    inside[:, 0] = True
    return alive & inside


def _resolved(values: torch.Tensor, weights: torch.Tensor, keep: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Whether the edge of what is kept lies strictly above the last candidate, hence above every token not looked at."""
    if values.shape[1] >= vocab_size:
        return torch.ones(values.shape[0], dtype=torch.bool, device=values.device)
    last_kept = values.gather(1, (keep.sum(dim=-1, keepdim=True) - 1).clamp_(min=0))[:, 0]
    no_mass_left = ~(weights[:, -1] > 0.0)  # also where there is no finite logit at all
    return (last_kept > values[:, -1]) | no_mass_left


def _to(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)
