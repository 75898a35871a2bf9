"""Many ranges in one launch: a Triton kernel over a table of addresses, since the KV of a prompt is thousands of small pieces.

Each program copies up to `_PIECE_BYTES` of one range. Ranges are cut on the host only where their lengths differ so much that
most programs would find nothing to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.transfer.engines.base import Ranges
from kvrelay.transfer.engines.ranges import Scanned, cut, scan

_PIECE_BYTES = 32 << 10
_STEP_BYTES = 16 << 10  # of a program, at a time
_MOST_PIECES = 65535  # of a launch's second dimension
_FIRST_ROWS = 2048  # of a table that are launched alone, while the rest is prepared
_IDLE_FACTOR = 4  # programs there may be for each that has something to do


@triton.jit(do_not_specialize=["to_address", "from_address"])
def _copy_kernel(
    table, to_address, from_address,
    ALIGNED: tl.constexpr, ITEM: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`table` has ranges, rows of offset there, offset here and size in bytes; with the two addresses, all are multiples of
    ALIGNED. ITEM bytes are copied as one number."""
    row = table + tl.program_id(0).to(tl.int64) * 3
    first = tl.program_id(1).to(tl.int64) * PIECE
    target = to_address + tl.load(row) + first
    source = from_address + tl.load(row + 1) + first
    count = tl.minimum(tl.load(row + 2) - first, PIECE) // ITEM  # not above 0: this range is shorter
    if ITEM == 8:
        count = tl.multiple_of(count, ALIGNED // ITEM)
        there = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), ALIGNED)
        here = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), ALIGNED)
    else:
        there = target.to(tl.pointer_type(tl.uint8))
        here = source.to(tl.pointer_type(tl.uint8))
    for start in range(0, PIECE // ITEM, STEP):
        places = start + tl.arange(0, STEP)
        inside = places < count
        tl.store(there + places, tl.load(here + places, mask=inside), mask=inside)


class Copies:
    """Queues copies on the current stream. The card reads the table out of host memory, where it stays: what was queued before
    must have ended."""

    def __init__(self, device: torch.device) -> None:
        self._on_card = device.type == "cuda"
        self._compiled: dict[int, Any] = {}  # by alignment: what Triton would look up again, which takes twice as long
        self._hold(2 * _FIRST_ROWS)

    def launch(self, to_address: int, from_address: int, scanned: Scanned) -> None:
        """In two launches where there are many, so that the card copies the first while the table of the others is made."""
        table, num_pieces = shaped(scanned)
        aligned = alignment(to_address | from_address | scanned.bits)
        if len(table) > len(self._array):
            self._hold(2 * len(table))
        for part in (slice(0, _FIRST_ROWS), slice(_FIRST_ROWS, len(table))):
            rows = table[part]
            if len(rows):
                self._array[part.start : part.start + len(rows)] = rows
                self._launch((len(rows), num_pieces, 1), self._table[part], to_address, from_address, aligned)

    def _launch(
        self, grid: tuple[int, int, int], table: torch.Tensor, to_address: int, from_address: int, aligned: int
    ) -> None:
        item = 8 if aligned >= 8 else 1
        arguments = (table, to_address, from_address, aligned, item, _PIECE_BYTES, _STEP_BYTES // item)
        compiled = self._compiled.get(aligned)
        if compiled is None:
            self._compiled[aligned] = _copy_kernel[grid](*arguments, num_warps=16)
        else:
            compiled[grid](*arguments)

    def _hold(self, num_rows: int) -> None:
        self._table = torch.zeros(num_rows, 3, dtype=torch.int64, pin_memory=self._on_card)
        self._array = self._table.numpy()


def shaped(scanned: Scanned) -> tuple[Ranges, int]:
    """The ranges, cut where that saves programs, and how many pieces the longest has."""
    ranges, most = scanned.ranges, -(-scanned.longest // _PIECE_BYTES)
    if most > 1 and (most > _MOST_PIECES or len(ranges) * most > _IDLE_FACTOR * int((-(-ranges[:, 2] // _PIECE_BYTES)).sum())):
        return cut(ranges, _PIECE_BYTES), 1
    return ranges, most


def alignment(bits: int) -> int:
    """The largest of 16, 8 and 1 that divides every address, offset and size, whose bits these are."""
    return 16 if bits % 16 == 0 else 8 if bits % 8 == 0 else 1


def warm_up(device: torch.device) -> None:
    """Compiles the kernel for each alignment, and tries it. Raises whatever Triton raises, or RuntimeError."""
    source = torch.arange(4096, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)
    copies = Copies(device)
    for offset, size in ((0, 32768), (8, 8), (3, 17)):
        copies.launch(target.data_ptr(), source.data_ptr(), scan(np.array([[offset, offset, size]], dtype=np.int64)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if not torch.equal(source, target):
        raise RuntimeError("the kernel does not copy what it should")
