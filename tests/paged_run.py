"""Sequences in one paged KV pool, computed in any cuts by a bare model, without engine or runner."""

from __future__ import annotations

import torch
from tiny_models import VOCAB_SIZE, reference_model

from kvrelay.kernels.base import AttentionBatch, ForwardBatch
from kvrelay.models.registry import Model

BLOCK_SIZE = 4
NUM_BLOCKS = 64


class PagedRun:
    """Several sequences in one KV pool, computed in any cuts."""

    def __init__(self, model: Model, prompts: list[list[int]], device: str = "cpu") -> None:
        spec = model.spec
        self.model = model
        self.device = torch.device(device)
        self.prompts = prompts
        self.done = [0] * len(prompts)
        # NaN: whatever is read without having been written shows
        shape = (spec.num_layers, 2, NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.kv = torch.full(shape, float("nan"), device=self.device)
        free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = [[free.pop() for _ in range(-(-len(prompt) // BLOCK_SIZE))] for prompt in prompts]

    def step(self, counts: dict[int, int], logit_rows: list[int] | None = None) -> dict[int, torch.Tensor]:
        """Computes the next `counts[row]` tokens of some rows; returns all their logits. `logit_rows` asks for those of
        some tokens only, for a step of one row."""
        tokens, positions, slots, starts, contexts = [], [], [], [0], []
        for row, count in counts.items():
            span = range(self.done[row], self.done[row] + count)
            tokens += [self.prompts[row][position] for position in span]
            positions += span
            slots += [self.tables[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in span]
            starts.append(len(tokens))
            contexts.append(span.stop)
            self.done[row] = span.stop
        width = max(-(-context // BLOCK_SIZE) for context in contexts)
        tables = [self.tables[row][: -(-context // BLOCK_SIZE)] for row, context in zip(counts, contexts, strict=True)]
        wanted = list(range(len(tokens))) if logit_rows is None else logit_rows
        batch = ForwardBatch(
            token_ids=self._tensor(tokens),
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            attention=AttentionBatch(
                query_start=self._tensor(starts).int(),
                context_lens=self._tensor(contexts).int(),
                block_tables=self._tensor([table + [0] * (width - len(table)) for table in tables]).int(),
                max_query=max(counts.values()),
                max_context=max(contexts),
            ),
            logit_rows=self._tensor(wanted),
        )
        logits = self.model.forward(batch, self.kv).float().cpu()
        return {row: logits[starts[i] : starts[i + 1]] for i, row in enumerate(counts)}

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def expected_logits(name: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [reference_model(name)(torch.tensor([prompt])).logits[0] for prompt in prompts]
