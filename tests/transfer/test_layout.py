"""Moving ranges between two layouts gives every token its bytes, whatever the block sizes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.transfer.blocks import Placement
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
    for here, there, size in move_ranges(placed, target, (start, stop), layers):
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


def test_neighbouring_blocks_move_as_one_range_per_plane() -> None:
    here = layout(16, 10)
    ranges = move_ranges(Placement(here, [2, 3, 4]), Placement(here, [5, 6, 7]), (0, 48), (0, 3))
    assert len(ranges) == 6  # three layers, K and V
    assert ranges[:, 2].tolist() == [3 * here.block_bytes] * 6


def test_what_does_not_fit_together_is_named() -> None:
    here = layout(16, 10)
    other = KVLayout(num_layers=3, num_blocks=4, block_size=32, num_kv_heads=2, head_dim=3, dtype="bfloat16", item_bytes=2)
    assert here.mismatch(layout(24, 99)) == ""
    assert here.mismatch(other) == "dtype is float32 here and bfloat16 there"
