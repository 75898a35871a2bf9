"""Moving ranges between two layouts gives every token its bytes, whatever the block sizes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.transfer import blocks
from kvrelay.transfer.blocks import Placement
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.kv.layout import KVLayout, move_ranges


def layout(block_size: int, num_blocks: int) -> KVLayout:
    return KVLayout(
        num_layers=3, num_blocks=num_blocks, block_size=block_size, num_kv_heads=2, head_dim=3, dtype="float32", item_bytes=4
    )


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 33), st.integers(1, 33)),
    skip=st.integers(0, 66),
    length=st.integers(0, 80),
    cut=st.integers(0, 80),
    layers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 2**32),
)
def test_exactly_the_wanted_tokens_arrive_where_they_belong(
    sizes: tuple[int, int], skip: int, length: int, cut: int, layers: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stop = skip + length
    counts = (-(-stop // sizes[0]), -(-length // sizes[1]))
    local, remote = (layout(size, count + 3) for size, count in zip(sizes, counts, strict=True))
    placed = Placement(local, rng.permutation(local.num_blocks)[: counts[0]].tolist())
    target = Placement(remote, rng.permutation(remote.num_blocks)[: counts[1]].tolist(), first_token=skip)
    start = min(skip + cut, stop)
    source = rng.integers(1, 255, local.size_bytes, dtype=np.uint8)
    arrived = np.zeros(remote.size_bytes, dtype=np.uint8)
    for here, there, size in move_ranges(placed, target, (start, stop), layers, writes=True):
        arrived[there : there + size] = source[here : here + size]

    before = source.reshape(3, 2, local.num_blocks, sizes[0], 24)
    after = arrived.reshape(3, 2, remote.num_blocks, sizes[1], 24)
    expected = np.zeros_like(after)
    for token in range(start, stop):
        index, offset = divmod(token, sizes[0])
        there_index, there_offset = divmod(token - skip, sizes[1])
        for layer in range(*layers):
            expected[layer, :, target.blocks[there_index], there_offset] = before[layer, :, placed.blocks[index], offset]
    assert np.array_equal(after, expected)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 33), st.integers(1, 33)),
    skip=st.integers(0, 66),
    length=st.integers(1, 80),
    data=st.data(),
)
def test_native_code_cuts_tokens_as_numpy_does(sizes: tuple[int, int], skip: int, length: int, data: st.DataObject) -> None:
    stop = skip + length
    start = data.draw(st.integers(skip, stop - 1))
    here = Placement(layout(sizes[0], 200), data.draw(st.permutations(range(-(-stop // sizes[0])))))
    there = Placement(layout(sizes[1], 200), data.draw(st.permutations(range(-(-length // sizes[1])))), first_token=skip)
    assert blocks.runs(here, there, (start, stop)).tolist() == blocks._by_numpy(here, there, (start, stop)).tolist()


@pytest.mark.parametrize("tokens", [(0, 16), (16, 65)])
def test_tokens_that_the_blocks_do_not_hold_are_refused(tokens: tuple[int, int]) -> None:
    here, there = Placement(layout(16, 10), [1, 2, 3, 4]), Placement(layout(16, 10), [5, 6, 7], first_token=16)
    with pytest.raises(TransferError, match="blocks for"):
        blocks.runs(here, there, tokens)


def test_neighbouring_blocks_move_as_one_range_per_plane() -> None:
    here = layout(16, 10)
    ranges = move_ranges(Placement(here, [2, 3, 4]), Placement(here, [5, 6, 7]), (0, 48), (0, 3), writes=True)
    assert len(ranges) == 6  # three layers, K and V
    assert ranges[:, 2].tolist() == [3 * here.block_bytes] * 6


@settings(max_examples=200, deadline=None)
@given(
    ranks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4])),
    num_heads=st.sampled_from([1, 2, 3, 4, 8]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    length=st.integers(1, 20),
    writes=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_rank_gets_its_heads_whatever_the_numbers_of_ranks(
    ranks: tuple[int, int], num_heads: int, sizes: tuple[int, int], length: int, writes: bool, seed: int
) -> None:
    """Heads are split, merged and repeated; the bytes tell layer, plane, token and head."""
    rng = np.random.default_rng(seed)
    shapes = [
        KVLayout(
            num_layers=2, num_blocks=-(-length // size) + 2, block_size=size, num_kv_heads=num_heads, head_dim=4, dtype="int8",
            item_bytes=1, tp=count,
        )
        for size, count in zip(sizes, ranks, strict=True)
    ]  # fmt: skip
    places = [Placement(each, rng.permutation(each.num_blocks)[: -(-length // each.block_size)].tolist()) for each in shapes]
    full = rng.integers(1, 255, (2, 2, length, num_heads, 4), dtype=np.uint8)
    sender, receiver = (0, 1) if writes else (1, 0)
    memory = [np.zeros(each.size_bytes, dtype=np.uint8) for each in shapes]
    memory[sender][:] = spread_over(full, places[sender])
    for here, there, size in move_ranges(places[0], places[1], (0, length), (0, 2), writes=writes):
        source, target = (here, there) if writes else (there, here)
        memory[receiver][target : target + size] = memory[sender][source : source + size]
    assert np.array_equal(memory[receiver], spread_over(full, places[receiver]))


def spread_over(full: npt.NDArray[np.uint8], place: Placement[KVLayout]) -> npt.NDArray[np.uint8]:
    """The memory of a worker that has this KV [layers, 2, tokens, heads, bytes], and nothing else."""
    shape = place.layout
    num_heads = len(shape.heads(0))
    kv = np.zeros((shape.tp, shape.num_layers, 2, shape.num_blocks, shape.block_size, num_heads, 4), dtype=np.uint8)
    for rank in range(shape.tp):
        heads = shape.heads(rank)
        assert len(heads) == num_heads
        for token in range(full.shape[2]):
            index, offset = divmod(token, shape.block_size)
            kv[rank, :, :, place.blocks[index], offset] = full[:, :, token, heads.start : heads.stop]
    return kv.reshape(-1)


def test_ranks_with_the_same_heads_move_whole_blocks() -> None:
    here = KVLayout(num_layers=3, num_blocks=8, block_size=16, num_kv_heads=2, head_dim=3, dtype="float32", item_bytes=4, tp=2)
    ranges = move_ranges(Placement(here, [2, 3]), Placement(here, [5, 6]), (0, 32), (0, 3), writes=True)
    assert ranges[:, 2].tolist() == [2 * here.block_bytes] * 12  # two ranks, three layers, K and V


def test_what_does_not_fit_together_is_named() -> None:
    here = layout(16, 10)
    other = KVLayout(num_layers=3, num_blocks=4, block_size=32, num_kv_heads=2, head_dim=3, dtype="bfloat16", item_bytes=2)
    assert here.mismatch(layout(24, 99)) == ""
    assert here.mismatch(other) == "dtype is float32 here and bfloat16 there"
