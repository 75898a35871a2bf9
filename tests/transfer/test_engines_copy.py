"""Native copies and the arithmetic of ranges."""

from __future__ import annotations

import ctypes
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.native.compile import load_native
from kvrelay.transfer import copy
from kvrelay.transfer.engines import ranges as arithmetic
from kvrelay.transfer.engines.base import Ranges, TransferError
from kvrelay.transfer.engines.ranges import coalesce, cut, groups

SIZE = 1 << 16
untimed = settings(deadline=None)  # the first one compiles

ranges_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 500)), max_size=40).map(
    lambda rows: np.array([(a * 512, b * 512, size) for a, b, size in rows], dtype=np.int64).reshape(-1, 3)
)


def moved_bytes(ranges: Ranges) -> list[tuple[int, int]]:
    """Every (local, remote) pair of byte positions."""
    return sorted((a + i, b + i) for a, b, size in ranges.tolist() for i in range(size))


@untimed
@given(ranges_lists, st.integers(1, 300))
def test_cutting_moves_the_same_bytes_in_short_pieces(ranges: Ranges, piece_bytes: int) -> None:
    pieces = cut(ranges, piece_bytes)
    assert moved_bytes(pieces) == moved_bytes(ranges)
    assert not len(pieces) or 0 < pieces[:, 2].min() <= pieces[:, 2].max() <= piece_bytes


@untimed
@given(ranges_lists, st.integers(1, 3000))
def test_groups_hold_the_same_bytes_and_about_so_many_each(ranges: Ranges, group_bytes: int) -> None:
    parts = groups(ranges, group_bytes)
    assert moved_bytes(np.concatenate(parts)) == moved_bytes(ranges)
    assert all(part[:, 2].sum() <= 2 * group_bytes for part in parts)


@untimed
@given(ranges_lists)
def test_coalescing_moves_the_same_bytes(ranges: Ranges) -> None:
    joined = coalesce(ranges)
    assert moved_bytes(joined) == moved_bytes(ranges)
    assert len(joined) <= len(ranges)


@untimed
@given(ranges_lists)
def test_coalescing_without_a_compiler_gives_the_same_ranges(ranges: Ranges) -> None:
    in_order = ranges[np.argsort(ranges[:, 0], kind="stable")]
    for some in (ranges, in_order):
        assert np.array_equal(coalesce(some), arithmetic._sort_and_join(some))


@untimed
@given(ranges_lists, st.sampled_from([-(1 << 63), -1, 0, 512, (1 << 63) - 1]), st.integers(0, 2))
def test_ranges_outside_a_region_are_found_with_and_without_a_compiler(ranges: Ranges, extreme: int, column: int) -> None:
    ranges = ranges.copy()
    ranges[-1:, column] = extreme
    is_inside = all(0 <= a <= 9000 - size and 0 <= b <= 8000 - size and size >= 0 for a, b, size in ranges.tolist())
    try:
        coalesce(ranges, 9000, 8000)
        found = True
    except TransferError:
        found = False
    assert found == is_inside == arithmetic._are_inside(ranges, 9000, 8000)


@pytest.mark.parametrize("native", [True, False])
def test_copies_exactly_the_ranges(native: bool) -> None:
    copy_ranges = copy.copy_ranges if native else copy._copy_by_ctypes
    random = np.random.default_rng(0)
    source = random.integers(0, 256, 5 << 20, dtype=np.uint8)
    target = np.zeros(5 << 20, dtype=np.uint8)
    ranges = np.array([[0, 100, 1], [10, 0, 3 << 20], [4 << 20, 5, 777], [4_500_000, 0, 0]], dtype=np.int64)
    assert copy_ranges(target.ctypes.data, source.ctypes.data, ranges, ctypes.c_int32(0))
    expected = np.zeros_like(target)
    for to, start, size in ranges.tolist():
        expected[to : to + size] = source[start : start + size]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("native", [True, False])
def test_stops_before_it_touches_anything_when_told_so(native: bool) -> None:
    copy_ranges = copy.copy_ranges if native else copy._copy_by_ctypes
    source, target = np.ones(SIZE, dtype=np.uint8), np.zeros(SIZE, dtype=np.uint8)
    assert not copy_ranges(target.ctypes.data, source.ctypes.data, np.array([[0, 0, SIZE]]), ctypes.c_int32(1))
    assert not target.any()


def test_the_copy_is_native_where_there_is_a_compiler() -> None:
    assert (copy._best_copy() is not copy._copy_by_ctypes) == (shutil.which("cc") is not None)


def c_file(folder: pathlib.Path, source: str) -> str:
    """As a module calls it that stands beside it."""
    (folder / "answer.c").write_text(source)
    return str(folder / "answer.py")


def test_source_that_does_not_compile_is_no_library_and_no_error(tmp_path: pathlib.Path) -> None:
    assert load_native(c_file(tmp_path, "this is not C")) is None


def test_native_code_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("KVRELAY_NATIVE", "0")
    assert load_native(c_file(tmp_path, "int answer(void) { return 42; }")) is None


def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    for _ in range(2):
        library = load_native(c_file(tmp_path, "int answer(void) { return 42; }"))
        assert library is not None
        assert library.answer() == 42
    assert len(list((tmp_path / "native").iterdir())) == 1


def test_a_library_of_the_wheel_that_cannot_be_loaded_is_compiled_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    (tmp_path / "answer.so").write_text("no library")
    library = load_native(c_file(tmp_path, "int answer(void) { return 42; }"))
    assert library is not None
    assert library.answer() == 42
