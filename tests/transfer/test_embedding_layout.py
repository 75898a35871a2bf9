"""Which bytes move for which tokens of an embedding, against a copy token by token; and the blocks of a pool."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from embedding_pair import fake_memory
from embedding_world import AUX_ITEMS, check_equal, embedding, joined, layout
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.transfer.blocks import Placement, placed_blocks
from kvrelay.transfer.embedding.layout import (
    EmbeddingLayout,
    embedding_layout,
    embedding_ranges,
)
from kvrelay.transfer.embedding.memory import PoolMemory, card_memory, host_memory
from kvrelay.transfer.embedding.pieces import Embedding, Piece, empty_piece, owned
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.engines.base import TransferError
from kvrelay.wire.embedding import PoolLayout
from tests.devices import ON_A_CARD


def offsets(shape: EmbeddingLayout, block: int, offset: int) -> list[tuple[int, int]]:
    """Where a token's row, fill id and positions are, and their sizes: written out once more."""
    place = block * shape.block_size + offset
    return [
        (place * shape.row_bytes, shape.row_bytes),
        (shape.fill_ids_offset + place * 4, 4),
        (shape.positions_offset + place * 12, 12),
    ]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    first=st.integers(0, 30),
    count=st.integers(1, 30),
    seed=st.integers(0, 2**32),
)
def test_ranges_cover_every_byte_of_every_token_once(sizes: tuple[int, int], first: int, count: int, seed: int) -> None:
    """The consumer's blocks begin at `first`, wherever that is in the producer's."""
    here, there = layout(sizes[0], 70), layout(sizes[1], 70)
    numbers = random.Random(seed)
    mine, theirs = numbers.sample(range(70), 70), numbers.sample(range(70), 70)
    ranges = embedding_ranges(Placement(here, mine), Placement(there, theirs, first), (first, first + count))
    moved = {(int(a) + i, int(b) + i) for a, b, size in ranges for i in range(int(size))}
    assert len(moved) == int(ranges[:, 2].sum()), "a byte moves twice"
    wanted = set()
    for token in range(first, first + count):
        sources = offsets(here, mine[token // here.block_size], token % here.block_size)
        targets = offsets(there, theirs[(token - first) // there.block_size], (token - first) % there.block_size)
        wanted |= {(a + i, b + i) for (a, size), (b, _) in zip(sources, targets, strict=True) for i in range(size)}
    if first == 0:
        a, b = (shape.aux_offset + block * shape.aux_bytes for shape, block in ((here, mine[0]), (there, theirs[0])))
        wanted |= {(a + i, b + i) for i in range(AUX_ITEMS * 8)}
    assert moved == wanted


def test_neighbouring_blocks_are_one_range_a_plane() -> None:
    shape = layout(128, 100)
    placement = Placement(shape, range(100))
    ranges = embedding_ranges(placement, placement, (0, 10_000))
    assert len(ranges) == 4
    assert int(ranges[:, 2].sum()) == 10_000 * shape.token_bytes + shape.aux_bytes


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "hidden", "item_bytes", "aux_items", "deepstack"])
def test_a_shape_that_cannot_be_is_refused(name: str) -> None:
    fields: dict[str, int] = dict.fromkeys(("num_blocks", "block_size", "hidden", "item_bytes", "aux_items", "deepstack"), 1)
    with pytest.raises(TransferError, match=name):
        embedding_layout(PoolLayout(dtype="float32", **{**fields, name: -1}))
    assert "hidden is 1 here and 2 there" in embedding_layout(PoolLayout(dtype="float32", **fields)).mismatch(
        embedding_layout(PoolLayout(dtype="float32", **{**fields, "hidden": 2}))
    )


def test_blocks_that_a_producer_names_must_exist_and_suffice() -> None:
    with pytest.raises(TransferError, match="cannot hold 9 tokens"):
        placed_blocks([0, 1], layout(4, 8), 9)
    with pytest.raises(TransferError, match="where there are 8 blocks"):
        placed_blocks([0, 8, 1], layout(4, 8), 9)


def test_a_pool_prefers_neighbours_and_gives_back_what_it_holds() -> None:
    shape = layout(4, 8)
    pool = EmbeddingPool(host_memory(shape))
    first, second, third = pool.take(8), pool.take(4), pool.take(8)
    assert (first, second, third) == ((0, 1), (2,), (3, 4))
    assert first is not None
    assert third is not None
    pool.give_back(first)
    assert pool.take(12) == (5, 6, 7), "side by side rather than first"
    assert pool.take(12) is None
    pool.quarantine(third)
    counts = pool.counts()
    assert (counts.total, counts.free, counts.held, counts.quarantined) == (8, 2, 4, 2)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(first)


def on_card(shape: EmbeddingLayout) -> PoolMemory:
    return card_memory(shape, torch.device("cuda"))


CARDS = [fake_memory, pytest.param(on_card, marks=ON_A_CARD)]


@pytest.mark.parametrize("make", [host_memory, *CARDS])
def test_what_is_stored_is_found_in_pieces(make: Callable[[EmbeddingLayout], PoolMemory]) -> None:
    memory, ready, blocks = make(layout(4, 8)), embedding(7, 14), (5, 6, 0, 3)
    memory.store(blocks, Embedding(rows=ready.rows, fill_ids=ready.fill_ids, positions=ready.positions, aux=(1, 2)))
    wait_for(memory)
    pieces = memory.pieces(blocks, 100, 14)
    assert [(piece.start, piece.stop) for piece in pieces] == [(100, 108), (108, 112), (112, 114)]
    assert all(piece.rows.device == memory.rows.device for piece in pieces)
    whole = joined(pieces)
    check_equal(Piece(0, whole.rows, whole.fill_ids, whole.positions), ready)
    assert memory.aux(5) == (14, 1, 2, 0, 0, 0, 0, 0)
    home = memory.home(14)
    moved = memory.move_out(home, blocks, 0, 14)
    assert [(piece.start, piece.stop) for piece in moved] == [(0, 8), (8, 12), (12, 14)]
    memory.rows[:] = 0
    check_equal(owned(moved), ready)
    assert owned(moved) is home


def wait_for(memory: PoolMemory) -> None:
    if memory.rows.is_cuda:
        torch.cuda.synchronize()


@pytest.mark.parametrize("make", CARDS)
def test_an_embedding_on_a_card_is_copied_to_the_host_once_and_only_for_who_needs_it(
    make: Callable[[EmbeddingLayout], PoolMemory],
) -> None:
    shape, ready = layout(4, 8), embedding(7, 14)
    card, host = make(shape), host_memory(shape)
    pool = EmbeddingPool(host, card, ["cuda_ipc"])
    assert pool.regions_on_card() == {"cuda_ipc": card.region}
    assert (pool.memory_of("cuda_ipc"), pool.memory_of("shm")) == (card, host)
    blocks = pool.take(14)
    assert blocks is not None
    pool.store(blocks, ready)
    wait_for(card)
    assert not pool.bring_to("cuda_ipc", blocks, 14)
    assert not host.rows.any()
    assert pool.bring_to("shm", blocks, 14)
    (piece,) = host.pieces(blocks, 0, 14)
    check_equal(piece, ready)
    assert host.aux(blocks[0]) == card.aux(blocks[0]) == (14, *ready.aux, 0, 0, 0)
    assert not pool.bring_to("nixl", blocks, 14)
    pool.give_back(blocks)
    assert pool.take(14) == blocks
    assert pool.bring_to("shm", blocks, 14), "another embedding"


def test_an_embedding_that_came_in_parts_is_not_copied_twice() -> None:
    """Parts that left the pool early are at home; those in the pool are put beside them."""
    numbers = np.arange(6, dtype=np.int32)
    whole = Piece(0, torch.arange(24, dtype=torch.uint8).reshape(6, 4), numbers, np.stack([numbers] * 3, axis=1))

    def part(start: int, stop: int) -> Piece:
        return Piece(start, whole.rows[start:stop], whole.fill_ids[start:stop], whole.positions[start:stop])

    home = empty_piece(6, 4, torch.device("cpu"))
    early = [home.put(part(0, 2)), home.put(part(2, 3))]
    assert [(piece.start, piece.stop) for piece in early] == [(0, 2), (2, 3)]
    mine = owned([*early, part(3, 6)])
    assert mine is home
    alone = owned([part(0, 6)])
    for got in (mine, alone):
        assert (got.rows == whole.rows).all()
        assert (got.fill_ids == whole.fill_ids).all()
        assert (got.positions == whole.positions).all()
        assert got.rows.data_ptr() != whole.rows.data_ptr()
