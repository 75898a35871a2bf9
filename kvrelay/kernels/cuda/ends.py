"""What a decode step has before its first layer and behind its last: inputs, rows of the embedding, the choice of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.cuda.launch import kernel, only_compiles, options, power_of_2

_COPIED = 1024  # elements a program
_PIECE = 2048  # logits of a row that a program looks at


@triton.jit
def _copy_row(table, place, out, row, width, BLOCK: tl.constexpr):
    """A program's part of out[row] = table[place]."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    tl.store(out + row * width + columns, tl.load(table + place.to(tl.int64) * width + columns, mask=inside), mask=inside)


@kernel()
def _rows_kernel(table, places, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _copy_row(table, tl.load(places + row), out, row, width, BLOCK)


def take_rows(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """table[places], which are not checked: each must be a row of the table."""
    assert table.is_contiguous()
    assert places.is_contiguous()
    width = table.shape[1]
    out = table.new_empty(places.shape[0], width)
    if len(places):
        _rows_kernel[(len(places), triton.cdiv(width, _COPIED))](table, places, out, width, BLOCK=_COPIED)
    return out


@kernel(do_not_specialize=["num_rows"])
def _inputs_kernel(columns, chosen, twin, tables, wide, num_rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _copy_row(twin, tl.load(columns + 5 * num_rows + row), tables, row, width, BLOCK)
    if tl.program_id(1) == 0:
        known = tl.load(columns + row).to(tl.int64)
        tl.store(wide + row, tl.maximum(known, tl.load(chosen + tl.load(columns + num_rows + row))))
        tl.store(wide + num_rows + row, tl.load(columns + 2 * num_rows + row).to(tl.int64))
        tl.store(wide + 2 * num_rows + row, tl.load(columns + 3 * num_rows + row).to(tl.int64))


def step_inputs(columns: torch.Tensor, chosen: torch.Tensor, twin: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """See `runner.ends.Ends`."""
    assert all(tensor.is_contiguous() for tensor in (columns, twin, tables))
    rows, width = tables.shape
    fresh = torch.zeros if only_compiles() else torch.empty  # by them PyTorch's kernels look up rows
    wide = fresh(3, rows, dtype=torch.int64, device=columns.device)
    grid = (rows, triton.cdiv(width, _COPIED))
    _inputs_kernel[grid](columns, chosen, twin, tables, wide, rows, width, BLOCK=_COPIED)
    return wide


@kernel()
def _pieces_kernel(logits, kept, values, tokens, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copies a piece of a row and finds its largest value: infinity, if one is no number."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    read = tl.load(logits + row * vocab_size + columns, mask=inside, other=float("-inf"))
    tl.store(kept + row * vocab_size + columns, read, mask=inside)
    wide = read.to(tl.float32)
    wide = tl.where(wide == wide, wide, float("inf"))
    largest, place = tl.max(wide, axis=0, return_indices=True, return_indices_tie_break_left=True)
    where = row * tl.num_programs(1) + piece
    tl.store(values + where, largest)
    tl.store(tokens + where, piece * BLOCK + place)


@kernel()
def _choice_kernel(values, tokens, out, num_pieces, PIECES: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    piece = tl.arange(0, PIECES)
    found = tl.load(values + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    largest, place = tl.max(found, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(tokens + row * num_pieces + place).to(tl.int64)
    tl.store(out + row, tl.where(tl.abs(largest) < float("inf"), token, -1))


def keep_likeliest(logits: torch.Tensor, kept: torch.Tensor, tokens: torch.Tensor) -> None:
    """See `runner.ends.Ends`."""
    assert all(tensor.is_contiguous() for tensor in (logits, kept))
    rows, vocab_size = logits.shape
    pieces = triton.cdiv(vocab_size, _PIECE)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    _pieces_kernel[(rows, pieces)](logits, kept, values, places, vocab_size, BLOCK=_PIECE, **options())
    _choice_kernel[(rows,)](values, places, tokens, pieces, PIECES=power_of_2(pieces), **options(num_warps=1))
