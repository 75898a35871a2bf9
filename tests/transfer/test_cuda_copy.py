"""The kernel that copies many ranges in one launch: on a card, or in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_here import DEVICE, HAS_TRITON, ON_CARD

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from kvrelay.transfer.engines.base import Ranges
from kvrelay.transfer.engines.cuda.copy import Copies, alignment, shaped, warm_up
from kvrelay.transfer.engines.ranges import scan

pytestmark = [pytest.mark.cuda] if ON_CARD else []

SIZE = 400_000


def check(ranges: Ranges) -> None:
    random = torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=random)
    expected = torch.zeros(SIZE, dtype=torch.uint8)
    for to, start, size in ranges.tolist():
        expected[to : to + size] = source[start : start + size]
    there, target = source.to(DEVICE), torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
    copies = Copies(DEVICE)
    copies.launch(target.data_ptr(), there.data_ptr(), scan(ranges))
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("multiple", [16, 8, 4, 1])
def test_exactly_the_ranges_are_copied_whatever_their_alignment(multiple: int) -> None:
    random = np.random.default_rng(multiple)
    places = random.permutation(40)[:30] * 8192
    starts = random.permutation(40)[:30] * 8192
    sizes = random.integers(1, 8192 // multiple, 30) * multiple
    check(np.column_stack((places + multiple, starts, sizes)).astype(np.int64))


def test_a_range_of_many_pieces_and_one_of_few() -> None:
    check(np.array([[0, 64, 200_000], [200_016, 8, 16], [300_000, 300_000, 65_536]], dtype=np.int64))


def test_one_long_range_among_short_ones_is_cut_and_equal_ones_are_not() -> None:
    short = np.array([[index * 64, index * 64, 64] for index in range(1000)], dtype=np.int64)
    table, pieces = shaped(scan(short))
    assert (len(table), pieces) == (1000, 1)
    table, pieces = shaped(scan(np.concatenate((short, [[100_000, 100_000, 1 << 20]]))))
    assert (len(table), pieces) == (1000 + 32, 1)
    assert int(table[:, 2].sum()) == 64_000 + (1 << 20)
    table, pieces = shaped(scan(np.array([[0, 0, 1 << 20], [1 << 20, 1 << 20, 1 << 20]], dtype=np.int64)))
    assert (len(table), pieces) == (2, 32)


def test_a_table_longer_than_any_before_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.transfer.engines.cuda.copy._FIRST_ROWS", 16)
    source = torch.arange(100_000, dtype=torch.uint8, device=DEVICE)
    target = torch.zeros_like(source)
    copies = Copies(DEVICE)
    for count in (10, 50, 20):
        places = np.arange(count, dtype=np.int64) * 16
        copies.launch(target.data_ptr(), source.data_ptr(), scan(np.column_stack((places, places, np.full(count, 16)))))
        assert torch.equal(target[: 16 * count].cpu(), source[: 16 * count].cpu())


def test_alignment_is_that_of_every_number() -> None:
    cases = ((32, [64, 16, 160], 16), (32, [64, 24, 160], 8), (32, [64, 16, 161], 1), (24, [64, 16, 160], 8))
    for address, last, wanted in cases:
        scanned = scan(np.array([[16, 32, 48], last], dtype=np.int64))
        assert (alignment(address | scanned.bits), scanned.longest, scanned.size_bytes) == (wanted, last[2], 48 + last[2])


def test_it_is_tried_before_it_is_used() -> None:
    warm_up(DEVICE)
