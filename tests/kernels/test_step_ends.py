"""Inputs of a decode step and the choice of its tokens, by PyTorch and by Triton."""

from __future__ import annotations

import pytest
import torch
from triton_here import DEVICE, HAS_TRITON, ON_CARD

from kvrelay.runner.ends import Ends, PlainEnds

NO_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
KINDS = [pytest.param("plain"), pytest.param("triton", marks=[NO_TRITON, *([pytest.mark.cuda] if ON_CARD else [])])]
every_kind = pytest.mark.parametrize("kind", KINDS)


def ends_of(kind: str) -> Ends:
    if kind == "plain":
        return PlainEnds()
    from kvrelay.kernels.cuda import ends

    return ends


@every_kind
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("width", [3, 1100])
def test_inputs_of_a_step(kind: str, num_rows: int, width: int) -> None:
    most, generator = 8, torch.Generator().manual_seed(num_rows)
    chosen = torch.tensor([7, -1, 123_456, 0, 5, 9, 2, 1, 0])
    sources = torch.tensor([most, 2, 1, most, 0])[:num_rows]
    known = torch.tensor([11, 0, 0, 0, 0])[:num_rows]
    positions, slots, places = (torch.randint(1, 20, (num_rows,), generator=generator) for _ in range(3))
    columns = torch.stack([known, sources, positions, slots, positions + 1, places]).int()
    twin = torch.randint(0, 1000, (20, width), generator=generator).int()
    tables = torch.full((num_rows, width), -5, dtype=torch.int32, device=DEVICE)
    wide = ends_of(kind).step_inputs(columns.to(DEVICE), chosen.to(DEVICE), twin.to(DEVICE), tables)
    assert wide.dtype is torch.int64
    assert wide.tolist() == [[11, 123_456, 0, 0, 7][:num_rows], positions.tolist(), slots.tolist()]
    assert torch.equal(tables.cpu(), twin[places])


@every_kind
@pytest.mark.parametrize("vocab_size", [1, 7, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_likeliest_of_each_row_is_kept_with_its_logits(kind: str, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-4, 4, (7, vocab_size), generator=generator).to(dtype)
    logits[1] = float("-inf")
    logits[2, vocab_size // 2] = float("nan")
    logits[3, -1] = float("inf")
    logits[4, : vocab_size - 1] = float("-inf")
    kept = torch.zeros(7, vocab_size, dtype=dtype, device=DEVICE)
    tokens = torch.zeros(7, dtype=torch.int64, device=DEVICE)
    ends_of(kind).keep_likeliest(logits.to(DEVICE), kept, tokens)
    assert torch.equal(kept.cpu().nan_to_num(nan=1e4), logits.nan_to_num(nan=1e4))
    expected = [row.argmax().item() for row in logits.numpy()]
    expected[1:4] = [-1, -1, -1]
    assert tokens.tolist() == expected


@NO_TRITON
@pytest.mark.parametrize("width", [5, 2000])
def test_rows_are_taken(width: int) -> None:
    from kvrelay.kernels.cuda.ends import take_rows

    table, places = torch.arange(9 * width, device=DEVICE).view(9, width).float(), torch.tensor([8, 0, 3, 3], device=DEVICE)
    assert torch.equal(take_rows(table, places), table[places])
    assert take_rows(table, places[:0]).shape == (0, width)
