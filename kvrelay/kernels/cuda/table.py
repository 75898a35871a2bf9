"""Which variant of a kernel a shape gets: measured on an H200 with `python -m kvrelay.kernels.cuda.tune`, in CUDA graphs.

Those of decode attention and of linears are the best of a whole captured step of Llama-3.1-8B's shape; those of weights in fp8
are measured in such steps alone. With weights in fp8 a step of 8 rows took 8.3 ms with weights widened in registers, 4.5 with
the library's products, and takes 3.0 with rows cut into parts; of 64 rows, which both round, it took 6.1 with the library's
products and takes 5.2 with Triton's.

Shapes are all that is asked here, never lengths on the device, so a choice holds for every replay of a captured graph. Rows
differ in length: with one of 8192 tokens among rows of 400, as many splits for each row took 6.6 / 6.9 / 9.1 / 12.7 ms a step
of 16 / 24 / 40 / 64 rows; with a least length of a split they take 5.1 / 5.5 / 5.9 / 6.8. That costs up to 2 % of a step whose
rows are of one length. Above `_MANY_HEADS` rows are not cut: programs without a split would take 5 % of a step of 256 rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    splits: int  # a power of 2
    tile: int  # tokens of KV a step
    num_warps: int
    num_stages: int
    early: bool = False  # load the first tile before waiting for the kernel before
    least: int = 0  # tokens of a split: a shorter row has fewer splits. 0: all rows have as many


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    query_tile: int  # queries x the query heads of a KV head
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LinearChoice:
    block_out: int  # rows of the weight a program
    block_in: int  # columns a step
    num_warps: int
    num_stages: int
    early: bool = False  # several rows: load the first tile of the weight before waiting for the kernel before
    ahead: int = 1  # one row: so many tiles of the weight are loaded before that wait
    pipelined: bool = False  # one row: so many stages are under way to shared memory


_MAX_SMALL_ROWS = 32  # of linears; more are faster in cuBLAS
_MAX_WIDE_ROWS = 64  # of those with many outputs, or of weights in fp8
_MAX_GATED_ROWS = 128  # of those with an activation and many outputs: 14336 give 112 of an H200's 132 multiprocessors a tile
_MANY_GATED_LINES = 8192  # fewer were not measured
MAX_CUT_ROWS = 32  # of weights in fp8: more rows are rounded
_MAX_SPLITS = 64
_MANY_HEADS = 1024  # of all rows: more are not cut
_PROGRAMS = 512  # decode programs that keep the card busy, if all rows are as long
_WIDE_HEAD_BYTES = 256  # of a head's keys: 128 x bfloat16


def is_triton_faster(num_rows: int, num_lines: int, gated: bool, weight_bytes: int) -> bool:
    """Than cuBLAS. `num_lines` as below. A weight of 1 byte is in fp8."""
    if weight_bytes == 1:
        return num_rows <= _MAX_WIDE_ROWS
    if gated and weight_bytes == 2 and num_lines > _MANY_GATED_LINES:
        return num_rows <= _MAX_GATED_ROWS
    return num_rows <= _MAX_SMALL_ROWS or (num_rows <= _MAX_WIDE_ROWS and (gated or 4096 < num_lines <= 32768))


_UNCUT = DecodeChoice(1, 32, 1, 3)


@functools.lru_cache(maxsize=4096)
def choose_decode(num_heads: int, max_context: int, head_bytes: int, narrow: bool = False) -> DecodeChoice:
    """`num_heads` counts the KV heads of all rows, `head_bytes` those of a head of the query. `narrow`: KV is in fp8."""
    wide = head_bytes > _WIDE_HEAD_BYTES
    if narrow and not wide and num_heads > _MANY_HEADS:
        return DecodeChoice(1, 64, 2, 3)
    if num_heads > _MANY_HEADS:
        return DecodeChoice(1, 32, 2, 2) if wide else _UNCUT
    few = num_heads <= 16  # of one row or two: many short splits were faster at 256, 1,000 and 4,000 tokens
    splits, tile = 1, 32 if wide or max_context <= 512 or few else 64
    num_programs = 2 * _PROGRAMS if few else _PROGRAMS
    while splits < _MAX_SPLITS and splits * num_heads < num_programs and splits * tile < max_context:
        splits *= 2
    if wide or tile == 32:
        return DecodeChoice(splits, tile, 4, 3 if few and not wide else 2)
    if splits == 1:
        return DecodeChoice(8, tile, 2, 3, early=True, least=640)
    if num_heads > 192:
        return DecodeChoice(8, tile, 2, 2, least=512)
    if num_heads > 64:
        return DecodeChoice(16, tile, 2, 2, least=96)
    return DecodeChoice(16, 16, 1, 3, early=True) if num_heads > 32 else DecodeChoice(splits, tile, 4, 3)


@functools.lru_cache(maxsize=1024)
def choose_mixed(num_heads: int, head_bytes: int) -> DecodeChoice:
    """Of rows that decode beside prompts, whose time is longer by far: few variants, all of which are compiled at start."""
    if num_heads > _PROGRAMS and head_bytes <= _WIDE_HEAD_BYTES:
        return _UNCUT
    splits = 32 if num_heads <= 128 else 4
    return DecodeChoice(splits, 32, 4, 2) if head_bytes > _WIDE_HEAD_BYTES else DecodeChoice(splits, 64, 4, 3)


@functools.lru_cache(maxsize=1024)
def choose_prefill(num_lines: int, head_bytes: int) -> PrefillChoice:
    """`num_lines`: the most queries of a row, times the query heads of a KV head."""
    if head_bytes > 2 * _WIDE_HEAD_BYTES:
        return PrefillChoice(32, 16, 4, 1)
    if head_bytes > _WIDE_HEAD_BYTES:
        return PrefillChoice(64, 32, 4, 2)
    if num_lines <= 32:
        return PrefillChoice(32, 64, 4, 3)
    if num_lines <= 64:
        return PrefillChoice(64, 64, 4, 3)
    return PrefillChoice(128, 128, 8, 2) if num_lines <= 16384 else PrefillChoice(128, 64, 4, 3)


@functools.lru_cache(maxsize=1024)
def choose_linear(num_rows: int, num_lines: int, width: int, gated: bool, scaled: bool = False) -> LinearChoice:
    """`num_lines` counts outputs: each has a row of the weight, of `width` columns, and with `gated` two. `scaled`: the weight
    is in fp8."""
    if scaled and num_rows > MAX_CUT_ROWS:
        return LinearChoice(128, 128, 8, 4) if gated else LinearChoice(64, 256, 4, 5)
    if scaled and num_rows > 1:
        if gated:
            return LinearChoice(64, 256, 4, 4)
        return LinearChoice(64, 256, 4, 5, early=True) if num_lines > 4096 else LinearChoice(64, 256, 4, 6)
    if scaled:
        if gated:
            return LinearChoice(2, 1024, 1, 3, pipelined=True)
        if num_lines > 4096:
            return LinearChoice(4, 512, 1, 3, ahead=2, pipelined=True)
        block_out, num_warps = (2, 1) if width > 4096 else (4, 2)
        return LinearChoice(block_out, 1024, num_warps, 3, ahead=2, pipelined=True)
    if num_rows == 1:
        if gated:
            return LinearChoice(2, 1024, 4, 3, ahead=3)
        if num_lines > 4096 or width <= 4096:
            return LinearChoice(4, 1024, 4, 3, ahead=2)
        return LinearChoice(4, 2048, 8, 3, ahead=2, pipelined=True)
    if num_rows <= 8 and num_lines <= 4096 and not gated:
        return LinearChoice(16, 512, 2, 4)  # tiles of 64 lines would be fewer than multiprocessors
    if num_lines > 32768:
        return LinearChoice(64, 128, 4, 3)
    if num_rows > 32:
        return LinearChoice(128, 64, 8, 4) if gated else LinearChoice(64, 128, 4, 4, early=True)
    if num_rows > 16:
        return LinearChoice(64, 128, 4, 5) if gated else LinearChoice(64, 128, 8, 5)
    if gated:
        return LinearChoice(64, 128, 4, 3, early=True)
    return LinearChoice(64, 256, 4, 4, early=True) if num_lines > 4096 else LinearChoice(64, 256, 4, 5)
