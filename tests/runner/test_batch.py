"""Batches equal what a loop over tokens would build, whatever the engine does to tokens and block tables."""

from __future__ import annotations

import bisect
import itertools
import random

import torch
from free_sequences import FreeSequence, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.kernels.base import ForwardBatch, bulk_end
from kvrelay.runner.batch import BatchBuilder, LogitLayout
from kvrelay.runner.inputs import SentInputs
from kvrelay.runner.tables import BlockTables

CPU = torch.device("cpu")


def make_builder(
    block_size: int, *, max_tokens: int = 4, max_rows: int = 2, max_blocks: int = 2, sent: bool = False
) -> BatchBuilder:
    """Small on purpose: everything must grow."""
    return BatchBuilder(
        block_size=block_size, max_tokens=max_tokens, max_rows=max_rows, max_blocks=max_blocks, device=CPU, sent=sent
    )


def assert_equals_naive(
    batch: ForwardBatch, layout: LogitLayout, plan: StepPlan, block_size: int, *, padded: bool = True
) -> None:
    tokens, positions, slots, wanted = [], [], [], []
    query_start, contexts, tables, sampled, prompts = [0], [], [], [], []
    for index, row in enumerate(plan.rows):
        sequence = row.sequence
        first = len(tokens)
        targets = 0
        for position in range(row.start, row.start + row.count):
            if row.prompt_logprobs and position + 1 < sequence.num_prompt_tokens:
                wanted.append(len(tokens))
                targets += 1
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(sequence.block_table[position // block_size] * block_size + position % block_size)
        if targets:
            prompts.append((index, wanted.index(first), targets))
        if row.samples:
            sampled.append((index, len(wanted)))
            wanted.append(len(tokens) - 1)
        query_start.append(len(tokens))
        contexts.append(row.start + row.count)
        tables.append(list(sequence.block_table[: -(-contexts[-1] // block_size)]))
    width = max(map(len, tables))
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.logit_rows.tolist() == wanted
    attention = batch.attention
    assert attention.query_start.tolist() == query_start
    assert attention.context_lens.tolist() == contexts
    found = attention.block_tables.tolist()
    if not padded:  # what stands behind a table's end means nothing
        found = [row[: len(table)] + [0] * (width - len(table)) for row, table in zip(found, tables, strict=True)]
    assert found == [table + [0] * (width - len(table)) for table in tables]
    assert attention.block_tables.is_contiguous()
    assert (attention.max_query, attention.max_context) == (max(r.count for r in plan.rows), max(contexts))
    assert (layout.sampled, layout.prompts, layout.num_rows) == (sampled, prompts, len(wanted))
    assert batch.token_ids.dtype == batch.positions.dtype == batch.slots.dtype == batch.logit_rows.dtype == torch.int64
    assert attention.query_start.dtype == attention.context_lens.dtype == attention.block_tables.dtype == torch.int32


class Traffic:
    """Sequences that grow, are copied on write, preempted and released at random."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.live: list[FreeSequence] = []

    def blocks(self, count: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(count)]

    def next_plan(self) -> StepPlan:
        rng = self.rng
        plan = StepPlan()
        for _ in range(rng.randrange(3)):
            tokens = [rng.randrange(500) for _ in range(rng.randrange(1, 40))]
            self.live.append(FreeSequence(tokens=tokens, num_prompt_tokens=rng.randrange(1, len(tokens) + 1)))
        if self.live and rng.random() < 0.3:
            plan.released.append(self.live.pop(rng.randrange(len(self.live))).key)
        for sequence in self.live:
            self.change(sequence)
            if rng.random() < 0.8:
                decode = rng.random() < 0.5
                start = len(sequence.tokens) - 1 if decode else rng.randrange(len(sequence.tokens))
                count = rng.randrange(1, len(sequence.tokens) - start + 1)
                last = start + count == len(sequence.tokens)
                plan.rows.append(Row(sequence, start, count, rng.randrange(3) if last else 0, rng.random() < 0.3))
        rng.shuffle(plan.rows)
        return plan

    def change(self, sequence: FreeSequence) -> None:
        rng = self.rng
        sequence.tokens.append(rng.randrange(500))
        event = rng.random()
        if event < 0.2:
            sequence.block_table = []  # preempted: a new table, shorter or longer
        elif event < 0.4 and sequence.block_table:
            sequence.block_table[rng.randrange(len(sequence.block_table))] = rng.randrange(1000)  # copied on write
        missing = -(-len(sequence.tokens) // self.block_size) - len(sequence.block_table)
        sequence.block_table.extend(self.blocks(max(0, missing) + rng.randrange(2)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 4, 16]))
def test_batches_equal_a_naive_loop_over_any_traffic(seed: int, block_size: int) -> None:
    traffic, builder = Traffic(seed, block_size), make_builder(block_size)
    for _ in range(12):
        plan = traffic.next_plan()
        builder.forget(plan.released)
        if plan.rows:
            batch, layout = builder.build(plan)
            assert_equals_naive(batch, layout, plan, block_size)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 16]), max_rows=st.sampled_from([16, 64]))
def test_batches_whose_tables_stay_on_the_device_equal_it_too(seed: int, block_size: int, max_rows: int) -> None:
    """With few places sequences lose theirs, and have them filled again when they return."""
    traffic = Traffic(seed, block_size)
    builder = make_builder(block_size, max_tokens=2000, max_rows=max_rows, max_blocks=120, sent=True)
    for _ in range(12):
        plan = traffic.next_plan()
        builder.forget(plan.released)
        if plan.rows:
            batch, layout = builder.build(plan)
            assert_equals_naive(batch, layout, plan, block_size, padded=False)


def test_released_sequences_are_forgotten_and_their_places_reused() -> None:
    builder = make_builder(4)
    for _ in range(5):
        sequences = [FreeSequence(tokens=[1] * 9, block_table=[7, 8, 9]) for _ in range(6)]
        builder.build(StepPlan(rows=[Row(s, 8, 1, 1) for s in sequences]))
        assert builder.num_known_sequences == 6
        builder.forget([s.key for s in sequences] + [10**9])
        assert builder.num_known_sequences == 0


def test_buffers_are_reused_between_steps() -> None:
    builder = make_builder(4, max_tokens=64, max_rows=8, max_blocks=8)
    sequence = FreeSequence(tokens=[1, 2, 3], block_table=[5])
    first, _ = builder.build(StepPlan(rows=[Row(sequence, 0, 3, 1)]))
    second, _ = builder.build(StepPlan(rows=[Row(sequence, 0, 3, 1)]))
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    assert first.attention.block_tables.data_ptr() == second.attention.block_tables.data_ptr()


def test_a_table_of_any_length_reaches_the_device() -> None:
    """The area may have to grow before the first of the two arrays, before the second, or not at all."""
    for length in range(1, 64):
        tables, inputs = BlockTables(2, 64, CPU, sent=True), SentInputs(40, CPU)
        sequence = FreeSequence(tokens=[0], block_table=list(range(100, 100 + length)))
        (place,) = tables.places([Row(sequence, 0, 1, 1)])
        inputs.begin()
        tables.fill_changed(inputs)
        inputs.send()
        tables.take_changed(inputs)
        assert tables.twin is not None
        assert tables.twin[place, :length].tolist() == sequence.block_table
        assert int(tables.twin.count_nonzero()) == length


def test_a_token_belongs_to_the_bulk_of_its_prompt_however_the_prompt_is_cut() -> None:
    prompts = [FreeSequence(tokens=[1] * length, block_table=list(range(20)), num_prompt_tokens=prompt)
               for length, prompt in ((300, 300), (300, 128), (200, 127), (1, 1), (191, 191))]  # fmt: skip
    builder = BatchBuilder(block_size=16, max_tokens=4, max_rows=2, max_blocks=2, device=CPU, bulk=True)
    expected = [list(range(192)), list(range(64)), [], [], list(range(64))]
    for cuts in ([0, 300], [0, 1, 64, 65, 191, 192, 200, 300], [0, 100, 299, 300]):
        found: list[list[int]] = [[] for _ in prompts]
        for begin, end in itertools.pairwise(cuts):
            rows = [Row(each, begin, min(end, len(each.tokens)) - begin, 0) for each in prompts if begin < len(each.tokens)]
            batch, _ = builder.build(plan(*rows))
            starts = batch.attention.query_start.tolist()
            for run_begin, run_end in batch.bulk:
                index = bisect.bisect_right(starts, run_begin) - 1
                assert run_end <= starts[index + 1]
                found[prompts.index(rows[index].sequence)] += batch.positions[run_begin:run_end].tolist()  # type: ignore[arg-type]
        assert found == expected


def test_the_last_tokens_of_a_prompt_are_never_its_bulk() -> None:
    assert [bulk_end(length) for length in (0, 1, 127, 128, 191, 192, 512)] == [0, 0, 0, 64, 64, 128, 448]
    assert all(64 <= length - bulk_end(length) < 128 for length in range(128, 1000))


def test_without_a_way_of_its_own_no_bulk_is_named() -> None:
    sequence = FreeSequence(tokens=[1] * 300, block_table=list(range(20)))
    assert make_builder(16).build(plan(Row(sequence, 0, 300, 1)))[0].bulk == ()
