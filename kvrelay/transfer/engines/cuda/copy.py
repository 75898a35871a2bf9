"""Many ranges in one launch: a Triton kernel over a table of addresses, since the KV of a prompt is thousands of small pieces.

Each program copies up to `_PIECE_BYTES` of one range. Ranges are cut on the host only where their lengths differ so much that
most programs would find nothing to do.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.transfer.engines.base import Ranges
from kvrelay.transfer.engines.ranges import cut

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
    """Queues copies on the current stream. The table stays where it is, so what was queued before must have ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hold(2 * _FIRST_ROWS)

    def launch(self, to_address: int, from_address: int, ranges: Ranges) -> None:
        """In two launches where there are many, so that the card copies the first while the table of the others is made."""
        table, num_pieces = shaped(ranges)
        if len(table) > len(self._array):
            self._hold(2 * len(table))
        for part in (slice(0, _FIRST_ROWS), slice(_FIRST_ROWS, len(table))):
            if part.start < len(table):
                self._launch(to_address, from_address, table[part], num_pieces, part)

    def _launch(self, to_address: int, from_address: int, table: Ranges, num_pieces: int, place: slice) -> None:
        """Of a part of the table."""
        aligned = alignment(to_address | from_address, table)
        item = 8 if aligned >= 8 else 1
        self._array[place][: len(table)] = table
        sent = self._sent[place][: len(table)]
        if self._sent is not self._staged:
            sent.copy_(self._staged[place][: len(table)], non_blocking=True)
        _copy_kernel[(len(table), num_pieces)](
            sent, to_address, from_address,
            ALIGNED=aligned, ITEM=item, PIECE=_PIECE_BYTES, STEP=_STEP_BYTES // item, num_warps=16,
        )  # fmt: skip

    def _hold(self, num_rows: int) -> None:
        on_card = self._device.type == "cuda"
        self._staged = torch.zeros(num_rows, 3, dtype=torch.int64, pin_memory=on_card)
        self._array = self._staged.numpy()
        self._sent = torch.zeros_like(self._staged, device=self._device) if on_card else self._staged


def shaped(ranges: Ranges) -> tuple[Ranges, int]:
    """The ranges, cut where that saves programs, and how many pieces the longest has."""
    most = -(-int(ranges[:, 2].max()) // _PIECE_BYTES)
    if most > 1 and (most > _MOST_PIECES or len(ranges) * most > _IDLE_FACTOR * int((-(-ranges[:, 2] // _PIECE_BYTES)).sum())):
        return cut(ranges, _PIECE_BYTES), 1
    return ranges, most


def alignment(addresses: int, ranges: Ranges) -> int:
    """The largest of 16, 8 and 1 that divides every address, offset and size; `addresses` has the bits of both."""
    bits = addresses | int(np.bitwise_or.reduce(ranges.reshape(-1)))
    return 16 if bits % 16 == 0 else 8 if bits % 8 == 0 else 1


def warm_up(device: torch.device) -> None:
    """Compiles the kernel for each alignment, and tries it. Raises whatever Triton raises, or RuntimeError."""
    source = torch.arange(4096, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)
    for offset, size in ((0, 32768), (8, 8), (3, 17)):
        Copies(device).launch(target.data_ptr(), source.data_ptr(), np.array([[offset, offset, size]], dtype=np.int64))
    if not torch.equal(source, target):
        raise RuntimeError("the kernel does not copy what it should")
