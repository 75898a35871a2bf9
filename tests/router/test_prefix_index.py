"""The prefix index against a model: a set of hashes per worker."""

from __future__ import annotations

import random

import pytest

from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.native.hashing import HASH_BYTES
from kvrelay.router import block_table
from kvrelay.router.block_table import BlockTable, NativeBlockTable, PlainBlockTable
from kvrelay.router.prefix_index import PrefixIndex


@pytest.fixture(params=["native", "plain"])
def table(request: pytest.FixtureRequest) -> BlockTable:
    library = block_table._library()
    if request.param == "plain":
        return PlainBlockTable()
    assert library is not None, "no compiler: the native table is not tested"
    return NativeBlockTable(library)


def digest(number: int, spread: int = 0) -> bytes:
    """With a spread of 0 all hashes want the same place in the table."""
    return (number * spread).to_bytes(8, "little") + number.to_bytes(8, "little")


class Model:
    def __init__(self) -> None:
        self.held: dict[WorkerId, set[bytes]] = {}

    def depth(self, worker: WorkerId, hashes: list[bytes]) -> int:
        held = self.held.get(worker, set())
        return next((depth for depth, each in enumerate(hashes) if each not in held), len(hashes))


@pytest.mark.parametrize(("num_workers", "spread"), [(5, 0), (5, 1), (70, 0x9E3779B97F4A7C15 % 2**40), (140, 3)])
def test_it_holds_what_the_workers_hold(table: BlockTable, num_workers: int, spread: int) -> None:
    rng = random.Random(num_workers + spread)
    index, model = PrefixIndex(table), Model()
    workers = [new_worker_id("decode") for _ in range(num_workers)]
    universe = [digest(number, spread) for number in range(120)]
    for step in range(1500):
        worker, some = rng.choice(workers), rng.sample(universe, rng.randrange(8))
        held = model.held.setdefault(worker, set())
        match rng.choices(["add", "remove", "clear", "replace", "drop"], [50, 40, 3, 3, 4])[0]:
            case "add":
                index.add(worker, some)
                held.update(some)
            case "remove":
                index.remove(worker, some)
                held.difference_update(some)
            case "clear":
                index.clear(worker)
                held.clear()
            case "replace":
                index.replace(worker, some)
                model.held[worker] = set(some)
            case "drop":
                index.drop(worker)
                del model.held[worker]
                workers[workers.index(worker)] = new_worker_id("decode")
        assert index._num_blocks.get(worker, 0) == len(model.held.get(worker, ()))
        if step % 25 == 0:
            check(index, model, rng.sample(universe, 4))
    check(index, model, universe)
    for worker in list(model.held):
        index.drop(worker)
    assert len(index) == 0


def check(index: PrefixIndex, model: Model, hashes: list[bytes]) -> None:
    for worker, held in model.held.items():
        assert index.hashes(worker) == held
    assert len(index) == len(set().union(*model.held.values()))
    expected = {worker: depth for worker in model.held if (depth := model.depth(worker, hashes))}
    assert index.match(b"".join(hashes)) == expected
    assert index.match(b"".join(hashes), 16) == {worker: 16 * depth for worker, depth in expected.items()}


def test_a_match_ends_where_a_block_is_missing(table: BlockTable) -> None:
    index = PrefixIndex(table)
    short, gap, none = (new_worker_id("decode") for _ in range(3))
    chain = [digest(number, 7) for number in range(1, 5)]
    index.add(short, chain[:2])
    index.add(gap, [chain[0], chain[2], chain[3]])
    index.add(none, chain[1:])
    assert index.match(b"".join(chain)) == {short: 2, gap: 1}
    assert index.match(b"") == {}
    assert index.match(digest(99, 7)) == {}


def test_a_slot_that_is_used_again_remembers_nothing(table: BlockTable) -> None:
    index = PrefixIndex(table)
    first, second = new_worker_id("decode"), new_worker_id("decode")
    index.add(first, [digest(1)])
    index.drop(first)
    index.drop(first)
    index.add(second, [digest(2)])
    assert index.hashes(first) == frozenset()
    assert index.match(digest(1)) == {}
    assert index.match(digest(2)) == {second: 1}


def test_many_blocks_and_what_is_no_hash(table: BlockTable) -> None:
    index, worker = PrefixIndex(table), new_worker_id("decode")
    hashes = [random.Random(number).randbytes(HASH_BYTES) for number in range(20_000)]
    index.add(worker, [*hashes, b"", b"short", bytes(17)])
    assert len(index) == 20_000
    assert index.hashes(worker) == frozenset(hashes)
    index.remove(worker, hashes[::2])
    assert index.hashes(worker) == frozenset(hashes[1::2])


def test_a_block_takes_little_memory_also_among_a_thousand_workers() -> None:
    """Two of them hold each, as after a hand-over."""
    library = block_table._library()
    assert library is not None
    index, workers = PrefixIndex(NativeBlockTable(library)), [new_worker_id("decode") for _ in range(1000)]
    for number in range(20_000):
        for worker in workers[number % 1000], workers[(number + 1) % 1000]:
            index.add(worker, [digest(number, 0x9E3779B97F4A7C15 % 2**40)])
    assert len(index) == 20_000
    assert 16 * 20_000 < index.size_bytes < 100 * 20_000


def test_of_more_workers_than_the_table_has_bits_for_nothing_is_known() -> None:
    library = block_table._library()
    assert library is not None
    table = NativeBlockTable(library)
    assert [table.add(digest(1), bit) for bit in (4095, 4096, 40_000)] == [1, 0, 0]
    assert table.match(digest(1), 40_001, 16) == ([4095], [16])
    assert table.remove(digest(1), 40_000) == table.clear(4096) == 0
    assert len(table) == 1
