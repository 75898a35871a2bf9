"""Passes on their way to the other ranks: a message with the shape, and inputs that are spread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rank_meeting import ranks_in_memory
from tiny_models import tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.kernels.base import AttentionBatch, ForwardBatch, ImageBatch
from kvrelay.kernels.ranks import SharedRanks
from kvrelay.runner import kv_pool
from kvrelay.runner.kv_pool import KVPool
from kvrelay.runner.ranks.leading import LeadingModel
from kvrelay.runner.ranks.passes import PassInputs, spread_inputs, to_pass
from kvrelay.wire.codec import encode
from kvrelay.wire.ranks import KVShare, Pass, read_for_rank

CPU = torch.device("cpu")


@pytest.fixture
def meeting() -> Iterator[list[SharedRanks]]:
    with ranks_in_memory(2) as ranks:
        yield ranks


def batch(
    *, ends: bool = False, images: bool = False, num_logits: int = 2, name: str = "", bulk: tuple[tuple[int, int], ...] = ()
) -> ForwardBatch:
    rows = AttentionBatch(
        query_start=torch.tensor([0, 3, 4], dtype=torch.int32),
        context_lens=torch.tensor([9, 6], dtype=torch.int32),
        block_tables=torch.arange(6, dtype=torch.int32).view(2, 3),
        max_query=3,
        max_context=9,
        lengths=((3, 9), (1, 6)),
    )
    return ForwardBatch(
        token_ids=torch.arange(4),
        positions=torch.tensor([6, 7, 8, 5]),
        slots=torch.tensor([22, 23, -1, 5]),
        attention=rows,
        logit_rows=torch.tensor([2, 3])[:num_logits],
        ends=AttentionBatch(torch.arange(2).int(), rows.context_lens, rows.block_tables, 1, 64) if ends else None,
        images=ImageBatch(torch.arange(12).view(3, 4), torch.tensor([1, 2]), torch.randn(2, 8), 1) if images else None,
        bulk=bulk,
        name=name,
    )


@pytest.mark.parametrize("shape", [{}, {"ends": True}, {"images": True}, {"num_logits": 0}, {"bulk": ((0, 2),)}], ids=str)
def test_a_rank_gets_what_rank_0_computes_with(meeting: list[SharedRanks], shape: dict[str, Any]) -> None:
    told = batch(**shape)
    message = read_for_rank.decode(encode(to_pass(told, 16, None, [4])))
    assert isinstance(message, Pass)
    assert message.dropped == [4]
    leads = threading.Thread(target=spread_inputs, args=[told, meeting[0]])
    leads.start()
    got = PassInputs(message, torch.float32, CPU).receive(meeting[1], None)
    leads.join()
    assert torch.equal(got.positions, told.positions)
    assert torch.equal(got.slots, told.slots)
    assert torch.equal(got.logit_rows, told.logit_rows)
    assert got.bulk == told.bulk
    assert got.token_ids.shape == told.token_ids.shape
    assert (got.ends is None) == (told.ends is None)
    for mine, theirs in ((got.attention, told.attention), (got.ends, told.ends)):
        if mine is None or theirs is None:
            continue
        assert torch.equal(mine.query_start, theirs.query_start)
        assert torch.equal(mine.context_lens, theirs.context_lens)
        assert torch.equal(mine.block_tables, theirs.block_tables)
        assert (mine.max_query, mine.max_context, mine.lengths) == (theirs.max_query, theirs.max_context, theirs.lengths)
    assert (got.images is None) == (told.images is None)
    if got.images is not None and told.images is not None:
        for name in ("axes", "places", "features"):
            assert torch.equal(getattr(got.images, name), getattr(told.images, name)), name


def test_steps_that_decode_have_one_message_and_the_same_tensors(meeting: list[SharedRanks]) -> None:
    def step(context: int) -> ForwardBatch:
        lens = torch.tensor([context], dtype=torch.int32)
        rows = AttentionBatch(torch.arange(2).int(), lens, torch.tensor([[4, 2]], dtype=torch.int32), 1, context)
        return ForwardBatch(torch.tensor([5]), lens - 1, lens + 3, rows, torch.zeros(1, dtype=torch.int64))

    messages = [to_pass(step(context), 16, None, []) for context in (17, 18, 32)]
    assert messages[0] == messages[1] == messages[2]
    assert messages[0].max_context == 32
    inputs = PassInputs(messages[0], torch.float32, CPU)
    for context in (17, 32):
        leads = threading.Thread(target=spread_inputs, args=[step(context), meeting[0]])
        leads.start()
        got = inputs.receive(meeting[1], None)
        leads.join()
        assert (got.positions.item(), got.slots.item()) == (context - 1, context + 3)
        assert got.attention.context_lens.tolist() == [context]
        assert got.attention.block_tables.tolist() == [[4, 2]]


class _Group:
    """Hears what the others are told."""

    def __init__(self) -> None:
        self.told: list[Pass] = []
        self.ranks = SimpleNamespace(spread=lambda x: x)

    def tell(self, message: Pass) -> None:
        self.told.append(message)


def test_a_pass_that_is_captured_is_told_once_and_every_other_each_time() -> None:
    group = _Group()
    model = SimpleNamespace(spec=None, dtype=torch.float32, forward=lambda *_: torch.empty(0))
    adapters = SimpleNamespace(take_dropped=lambda: [7])
    leading = LeadingModel(cast("Any", model), cast("Any", group), cast("Any", adapters))
    on_card = cast("Any", SimpleNamespace(is_cuda=True, shape=(1, 2, 8, 16, 2, 4)))
    for name in ("", "decode steps 8", "decode steps 8", "", "decode steps 4"):
        leading.forward(batch(name=name), on_card)
    assert [message.name for message in group.told] == ["", "decode steps 8", "", "decode steps 4"]
    assert all(message.dropped == [7] for message in group.told)


def test_shares_that_are_added_are_copied_with_the_first_and_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(tiny_model("kv2"))
    pool = KVPool(spec, num_blocks=4, block_size=2, dtype=torch.float32, device=CPU)
    others = [torch.randn(3 + pool.tensor.numel()) for _ in range(2)]  # each in an allocation that begins before it
    closed: list[int] = []
    opened = {bytes([number]): other.data_ptr() for number, other in enumerate(others)}
    driver = SimpleNamespace(open=opened.__getitem__, close=closed.append)
    monkeypatch.setattr(kv_pool, "Driver", lambda index: driver)
    pool.add([KVShare(handle=handle, offset=12) for handle in opened])
    expected = [other[3:].view(pool.tensor.shape)[:, :, 1].clone() for other in others]
    pool.tensor[:, :, 1] = 5.0
    pool.copy_blocks([(1, 3)])
    assert torch.equal(pool.tensor[:, :, 3], pool.tensor[:, :, 1])
    for other, block in zip(others, expected, strict=True):
        assert torch.equal(other[3:].view(pool.tensor.shape)[:, :, 3], block)
    pool.close()
    assert closed == list(opened.values())
    assert len(pool.shares) == 1
