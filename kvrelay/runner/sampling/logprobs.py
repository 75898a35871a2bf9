"""Logprobs of sampled tokens and of prompt tokens.

They are of the model's own distribution: the logits before bias, penalties, masks and temperature. So they say what the model
thought, they are comparable between requests, and a token that a grammar forced shows how unlikely it was.
"""

from __future__ import annotations

import torch

from kvrelay.runner.sampling.draw import best
from kvrelay.wire.serving import Logprob, TokenLogprobs

_MOST_ELEMENTS = 8 * 2**20  # logits turned into logprobs at once, so that long prompts need little extra memory


def token_logprobs(logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """For row i of the logits: the logprob of tokens[i] and of the num_top[i] most likely tokens."""
    assert len(tokens) == len(num_top) == logits.shape[0]
    at_once = max(1, _MOST_ELEMENTS // logits.shape[1])
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens), at_once):
        last = first + at_once
        found.extend(_few(logits[first:last], tokens[first:last], num_top[first:last]))
    return found


def named_logprobs(logits: torch.Tensor, tokens: list[int]) -> list[Logprob]:
    """Of these tokens, from one row of logits, in falling order."""
    values = logits.float().log_softmax(dim=-1)[torch.tensor(tokens, device=logits.device)].tolist()
    return sorted(zip(tokens, values, strict=True), key=lambda entry: -entry[1])


def best_logprobs(logits: torch.Tensor, count: int) -> list[list[Logprob] | None]:
    """For each row of the logits: its `count` most likely tokens in falling order, of equal ones the lower ids; None where no
    logit is finite."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = best(logprobs, count + 1)
    if count < logits.shape[1]:
        # Where the first one left out is as likely as the last one taken, which of the equal ones were found is chance.
        tied = (values[:, count] == values[:, count - 1]).nonzero()[:, 0]
        if len(tied):
            all_values, all_ids = logprobs[tied].sort(dim=-1, descending=True, stable=True)
            values[tied], ids[tied] = all_values[:, : count + 1], all_ids[:, : count + 1]
    usable = torch.isfinite(values[:, 0]).tolist()
    rows = zip(usable, ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    return [list(zip(row_ids, row_values, strict=True)) if is_usable else None for is_usable, row_ids, row_values in rows]


def _few(logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    own = chosen[:, 0].tolist()
    ranks = (1 + (logprobs > chosen).sum(dim=-1)).tolist()
    most = min(max(num_top), logits.shape[1])
    if most == 0:
        return [TokenLogprobs(logprob, [], rank) for logprob, rank in zip(own, ranks, strict=True)]
    values, ids = best(logprobs, most)
    rows = zip(own, ids.tolist(), values.tolist(), num_top, ranks, strict=True)
    return [
        TokenLogprobs(logprob, list(zip(top_ids[:count], top_values[:count], strict=True)), rank)
        for logprob, top_ids, top_values, count, rank in rows
    ]
