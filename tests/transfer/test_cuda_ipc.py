"""What is special to `cuda_ipc`, beside the contract of all engines: handles, offsets, groups, and what the driver says."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from transfer_peers import FAKE_CARD, ProcessPeer, random_bytes

from kvrelay.ids import new_worker_id
from kvrelay.native import driver
from kvrelay.transfer.engines.base import Completion, MoveId, TransferError
from kvrelay.transfer.engines.cuda.card import check_driver
from kvrelay.transfer.engines.cuda.ipc import CudaIpcEngine, CudaIpcInfo
from kvrelay.transfer.engines.ranges import scan
from kvrelay.transfer.engines.shm import ShmEngine
from kvrelay.transfer.region import Region, Share, shared_region
from tests.fake_card import FakeCard, card_bytes, card_region

SIZE = 1 << 20
HAS_CARD = torch.cuda.is_available()


@pytest.fixture
def peer() -> Iterator[ProcessPeer]:
    peer = ProcessPeer(FAKE_CARD, new_worker_id("prefill"), SIZE, seed=1)
    yield peer
    peer.end()


def open_engine(copy_delay_s: float = 0.0) -> tuple[CudaIpcEngine, FakeCard, Region]:
    card = FakeCard("cuda:0", copy_delay_s)
    engine, region = CudaIpcEngine(new_worker_id("decode"), lambda device: card), card_region(SIZE)
    engine.register(region)
    return engine, card, region


def ends(engine: CudaIpcEngine, count: int) -> list[Completion]:
    found: list[Completion] = []
    while len(found) < count:
        found += engine.poll()
    return found


def test_a_pool_is_opened_once_for_all_moves_and_closed_with_its_peer(peer: ProcessPeer) -> None:
    engine, card, region = open_engine()
    engine.add_peer(peer.worker, peer.info)
    for _ in range(3):
        engine.read(peer.worker, np.array([[0, 5, 1000], [2000, 3000, 100]], dtype=np.int64))
    assert [completion.error for completion in ends(engine, 3)] == [""] * 3
    assert card.num_opened == 1
    assert card.copied == [2, 2, 2]  # all ranges of a move in one launch
    assert np.array_equal(card_bytes(region)[:1000], random_bytes(SIZE, 1)[5:1005])
    engine.remove_peer(peer.worker)
    engine.close()
    while card.num_opened:
        pass


def test_a_pool_that_is_added_again_stays_open_until_the_last_link_has_gone(peer: ProcessPeer) -> None:
    engine, card, _ = open_engine(copy_delay_s=0.2)
    engine.add_peer(peer.worker, peer.info)
    first = engine.read(peer.worker, np.array([[0, 0, SIZE]], dtype=np.int64))
    engine.add_peer(peer.worker, peer.info)
    second = engine.read(peer.worker, np.array([[0, 0, SIZE]], dtype=np.int64))
    errors = {completion.id: completion.error for completion in ends(engine, 2)}
    assert set(errors) == {first, second}
    assert errors[second] == ""
    engine.close()
    while card.num_opened:
        pass


def test_a_late_copy_ends_when_it_has_ended_and_not_when_it_was_launched(peer: ProcessPeer) -> None:
    engine, _, region = open_engine(copy_delay_s=0.3)
    engine.add_peer(peer.worker, peer.info)
    move = engine.read(peer.worker, np.array([[0, 0, SIZE]], dtype=np.int64))
    seen: list[MoveId] = []
    while not seen:
        landed = bool(card_bytes(region)[:SIZE].any())
        seen = [completion.id for completion in engine.poll()]
        assert landed or not seen
    assert seen == [move]
    engine.close()


def test_a_damaged_handle_never_reaches_the_driver(peer: ProcessPeer) -> None:
    engine, card, _ = open_engine()
    told = msgspec.msgpack.decode(peer.info, type=CudaIpcInfo)
    (part,) = told.parts
    for wrong in (
        msgspec.structs.replace(told, parts=[msgspec.structs.replace(part, handle=b"\1" * 64)]),
        msgspec.structs.replace(told, parts=[msgspec.structs.replace(part, address=part.address + 8)]),
        msgspec.structs.replace(told, size_bytes=told.size_bytes + 1),
    ):
        with pytest.raises(TransferError, match="it was damaged"):
            engine.add_peer(peer.worker, msgspec.msgpack.encode(wrong))
    assert card.num_opened == 0
    engine.close()


def in_parts(sizes: int, seed: int) -> tuple[CudaIpcEngine, list[Region]]:
    """An engine whose region goes on in memory of other ranks."""
    card = FakeCard("cuda:0")
    first, *others = parts = [card_region(SIZE) for _ in range(sizes)]
    for number, part in enumerate(parts):
        card_bytes(part)[:] = random_bytes(SIZE, seed + number)
    shares = tuple(Share(part.address, *card.export(part.address, SIZE)) for part in others)
    engine = CudaIpcEngine(new_worker_id("decode"), lambda device: card)
    engine.register(Region(address=first.address, size_bytes=sizes * SIZE, device="cuda:0", shares=shares))
    return engine, parts


@pytest.mark.parametrize(("num_here", "num_there"), [(1, 2), (2, 1), (3, 2)])
def test_a_region_that_goes_on_in_memory_of_other_ranks_is_one_to_its_peer(num_here: int, num_there: int) -> None:
    producer, theirs = in_parts(num_there, seed=1)
    consumer, ours = in_parts(num_here, seed=10)
    before = np.concatenate([card_bytes(part) for part in ours])
    there = np.concatenate([card_bytes(part) for part in theirs])
    worker = new_worker_id("prefill")
    consumer.add_peer(worker, producer.local_info())
    last_here, last_there = num_here * SIZE - 700, num_there * SIZE - 700
    across = [5000, SIZE - 300, 700] if num_there > 1 else [SIZE - 300, 5000, 700]  # two parts of one side
    ranges = np.array([[0, last_there, 700], across, [last_here, 8, 600], [9000, last_there - 4096, 64]], dtype=np.int64)
    consumer.read(worker, ranges)
    assert [completion.error for completion in ends(consumer, 1)] == [""]
    for here, remote, size in ranges.tolist():
        before[here : here + size] = there[remote : remote + size]
    assert np.array_equal(np.concatenate([card_bytes(part) for part in ours]), before)
    for engine in (producer, consumer):
        engine.close()


def test_other_engines_refuse_what_goes_on_elsewhere() -> None:
    region = shared_region(4096)
    region.shares = (Share(region.address, b"", 0),)
    with pytest.raises(TransferError, match="shm moves one piece of memory, not 2"):
        ShmEngine(new_worker_id("decode")).register(region)
    region.close()


def test_a_peer_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch, peer: ProcessPeer) -> None:
    engine, _, _ = open_engine()
    monkeypatch.setattr("kvrelay.transfer.engines.cuda.ipc.host_identity", lambda: "elsewhere")
    with pytest.raises(TransferError, match="on another host or in another container"):
        engine.add_peer(peer.worker, peer.info)
    engine.close()


def test_host_memory_is_refused() -> None:
    with pytest.raises(TransferError, match="not memory on cpu"):
        CudaIpcEngine(new_worker_id("decode")).register(shared_region(4096))


@pytest.mark.skipif(HAS_CARD, reason="there is a card")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(TransferError, match="needs NVIDIA's driver"):
        check_driver()


def test_the_drivers_structures_have_the_sizes_of_its_header() -> None:
    assert ctypes.sizeof(driver._Handle) == 64
    handle = bytes(range(64))
    assert bytes(driver._Handle.from_buffer_copy(handle).reserved) == handle


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CARD, reason="no NVIDIA card")
def test_a_tensor_inside_an_allocation_is_exported_with_its_offset() -> None:
    from kvrelay.transfer.engines.cuda.nvidia import NvidiaCard

    memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    card = NvidiaCard("cuda")
    whole, first = card.export(memory.data_ptr(), memory.numel())
    part, later = card.export(memory.data_ptr() + (1 << 20), 1 << 20)
    assert whole == part
    assert later == first + (1 << 20)


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CARD, reason="no NVIDIA card")
@pytest.mark.parametrize("how", ["triton", "driver"])
def test_both_ways_to_copy_bring_exactly_the_ranges(how: str) -> None:
    from kvrelay.native.driver import Driver
    from kvrelay.transfer.engines.cuda.nvidia import StreamCopier, by_driver, choose_launch

    card = Driver(0)
    make_launch = choose_launch(card, torch.device("cuda", 0))
    launch = make_launch() if how == "triton" else by_driver(card)
    assert how == "driver" or launch.__qualname__.startswith("_by_triton"), "Triton cannot copy here"
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    ranges = np.array([[0, 100, 5000], [8192, 16384, 65536], [500_001, 3, 1]], dtype=np.int64)
    StreamCopier(lambda: launch, torch.device("cuda", 0)).start(target.data_ptr(), source.data_ptr(), scan(ranges)).wait()
    expected = torch.zeros_like(source)
    for to, start, size in ranges.tolist():
        expected[to : to + size] = source[start : start + size]
    assert torch.equal(target, expected)
