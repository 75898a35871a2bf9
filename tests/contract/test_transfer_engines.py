"""The contract of kvrelay/transfer/engines/base.py, held against every engine: the fake one and the real ones.

NIXL and Mooncake are not optional here: where they are not installed these tests fail. `cuda_ipc` runs on host memory for
want of a card, and with `-m cuda` on one, as do NIXL and Mooncake with a card's memory.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet
from devices import ON_A_CARD
from memory_faults import Fate, FaultyEngine
from patience import PATIENCE_S
from transfer_peers import (
    FAKE_CARD,
    ON_CARD,
    Bytes,
    LocalPeer,
    ProcessPeer,
    digest,
    engine_of,
    floats,
    random_bytes,
    region_of,
    view,
)

from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferEngine, TransferError
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.engines.memory import MemoryEngine, MemoryNetwork
from kvrelay.transfer.region import Region, shared_region

SIZE = 4 << 20
REMOTE_SIZE = 5 << 20  # unequal, so that one side's size is never taken for the other's
CALL_S = 2.0  # only a guard: no call waits for a peer


@dataclass(frozen=True)
class Case:
    """`engine` with its peer here or in a process of its own. `nixl-tcp` is nixl as it works between hosts, `nixl-cuda` and
    `mooncake-cuda` have memory of a card, `cuda_ipc-fake` is cuda_ipc without one."""

    engine: str
    in_process: bool = False


def on_card(case: Case) -> ParameterSet:
    return pytest.param(case, marks=ON_A_CARD)


HERE = [
    *(Case(name) for name in ("memory-producer", "memory-consumer", "shm", "nixl", "mooncake", FAKE_CARD)),
    *(on_card(Case(name)) for name in ON_CARD),
]
IN_PROCESS = [
    *(Case(name, in_process=True) for name in ("shm", "nixl", "nixl-tcp", "mooncake", FAKE_CARD)),
    *(on_card(Case(name, in_process=True)) for name in ON_CARD),
]


def name_of(case: Case) -> str:
    return f"{case.engine}{'-process' if case.in_process else ''}"


class Pair:
    """An engine under test and its peer, which know each other."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.network = MemoryNetwork()
        self.worker = new_worker_id("prefill")
        self.region: Region = region_of(case.engine, SIZE)
        self.memory: Bytes = view(self.region)
        with self._environment():
            self.engine = self.make(self.worker)
            self.peer = self._make_peer()
            self.engine.register(self.region)
        self.peer.know(self.worker, self.engine.local_info())
        self.engine.add_peer(self.peer.worker, self.peer.info)

    def make(self, worker: WorkerId) -> TransferEngine:
        if self.case.engine.startswith("memory"):
            return MemoryEngine(worker, self.network, mover=Mover(self.case.engine.removeprefix("memory-")))
        return engine_of(self.case.engine, worker)

    def _make_peer(self) -> LocalPeer | ProcessPeer:
        worker = new_worker_id("decode")
        if self.case.in_process:
            return ProcessPeer(self.case.engine, worker, REMOTE_SIZE, seed=1)
        return LocalPeer(self.make(worker), worker, region_of(self.case.engine, REMOTE_SIZE), seed=1)

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Keeps nixl from its short cut between processes of one host."""
        if self.case.engine == "nixl-tcp":
            os.environ["UCX_TLS"] = "tcp"
        yield
        os.environ.pop("UCX_TLS", None)

    @property
    def process(self) -> ProcessPeer:
        assert isinstance(self.peer, ProcessPeer)
        return self.peer

    def ends(self, *moves: MoveId, within_s: float = PATIENCE_S) -> list[Completion]:
        """Polls until these have appeared. Nothing else may."""
        return ends_of(self.engine, *moves, within_s=within_s)

    def fails(self, call: str, ranges: Ranges) -> None:
        operation = self.engine.read if call == "read" else self.engine.write
        with pytest.raises(TransferError):
            operation(self.peer.worker, ranges)

    def close(self) -> None:
        self.engine.close()
        self.peer.end()
        self.region.close()


def ends_of(engine: TransferEngine, *moves: MoveId, within_s: float = PATIENCE_S) -> list[Completion]:
    wanted, found, deadline = set(moves), [], time.monotonic() + within_s
    while wanted:
        for completion in engine.poll():
            assert completion.id in wanted, "an id that was not open, or appears twice"
            wanted.remove(completion.id)
            found.append(completion)
        assert time.monotonic() < deadline, f"{len(wanted)} moves never ended"
        time.sleep(0.0005)
    assert engine.poll() == []
    return sorted(found, key=lambda completion: moves.index(completion.id))


def ranges_of(*rows: tuple[int, int, int]) -> Ranges:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def whole() -> Ranges:
    return ranges_of((0, 0, SIZE))


def random_ranges(seed: int, count: int, max_size: int) -> Ranges:
    """Disjoint at their target on either side, empty ones among them, in any order."""
    random = np.random.default_rng(seed)
    slots = SIZE // max_size
    local, remote = (random.permutation(slots)[:count] * max_size for _ in range(2))
    sizes = np.where(random.random(count) < 0.1, 0, random.integers(1, max_size, count, endpoint=True))
    return np.column_stack((local, remote, sizes)).astype(np.int64)


def copied(target: Bytes, source: Bytes, ranges: Ranges, *, writes: bool) -> Bytes:
    """What the target must hold afterwards."""
    result = target.copy()
    for local, remote, size in ranges.tolist():
        to, start = (remote, local) if writes else (local, remote)
        result[to : to + size] = source[start : start + size]
    return result


@pytest.fixture(scope="module", params=HERE + IN_PROCESS, ids=name_of)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """As after the first hello, with known bytes on both sides."""
    assert shared_pair.engine.poll() == []
    shared_pair.engine.add_peer(shared_pair.peer.worker, shared_pair.peer.info)
    shared_pair.memory[:] = random_bytes(SIZE, seed=2)
    shared_pair.peer.fill(1)
    return shared_pair


@pytest.fixture(params=HERE + IN_PROCESS, ids=name_of)
def own_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """For tests that close the engine or kill the peer."""
    pair = Pair(request.param)
    yield pair
    if isinstance(pair.peer, ProcessPeer):
        pair.peer.go_on()
    pair.close()


@pytest.fixture(params=IN_PROCESS, ids=name_of)
def process_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.process.go_on()
    pair.close()


RANGE_LISTS = {
    "random": [random_ranges(seed, 200, 12_000) for seed in range(4)],
    "large": [random_ranges(9, 7, 500_000)],
    "many small": [random_ranges(5, 3000, 700)],
    "one byte": [ranges_of((SIZE - 1, REMOTE_SIZE - 1, 1))],
    "whole region": [whole()],
    "neighbours": [ranges_of(*((i * 4096, 8192 + i * 4096, 4096) for i in range(100)))],
    "empty among others": [ranges_of((0, 0, 0), (10, 20, 30), (SIZE, REMOTE_SIZE, 0))],
    "nothing": [ranges_of(), ranges_of((5, 5, 0))],
}


@pytest.mark.parametrize("kind", RANGE_LISTS)
def test_a_read_brings_exactly_the_ranges(pair: Pair, kind: str) -> None:
    for ranges in RANGE_LISTS[kind]:
        expected = copied(pair.memory, random_bytes(REMOTE_SIZE, 1), ranges, writes=False)
        (completion,) = pair.ends(pair.engine.read(pair.peer.worker, ranges))
        assert completion.error == ""
        assert np.array_equal(pair.memory, expected)
    assert pair.peer.digest() == digest(random_bytes(REMOTE_SIZE, 1))


@pytest.mark.parametrize("kind", RANGE_LISTS)
def test_a_write_brings_exactly_the_ranges_where_producers_write(pair: Pair, kind: str) -> None:
    expected, mine = random_bytes(REMOTE_SIZE, 1), pair.memory.copy()
    for ranges in RANGE_LISTS[kind]:
        if pair.engine.mover is Mover.CONSUMER:
            pair.fails("write", ranges)
            continue
        expected = copied(expected, mine, ranges, writes=True)
        (completion,) = pair.ends(pair.engine.write(pair.peer.worker, ranges))
        assert completion.error == ""
    assert pair.peer.digest() == digest(expected)
    assert np.array_equal(pair.memory, mine)


@pytest.mark.parametrize("own_pair", [on_card(Case(name)) for name in ON_CARD], ids=name_of, indirect=True)
def test_what_has_arrived_is_there_for_a_stream_that_waited_for_nothing(own_pair: Pair) -> None:
    """While the card is busy with other copies."""
    assert isinstance(own_pair.peer, LocalPeer)
    writes = own_pair.engine.mover is Mover.PRODUCER
    regions = (own_pair.region, own_pair.peer.region) if writes else (own_pair.peer.region, own_pair.region)
    start = own_pair.engine.write if writes else own_pair.engine.read
    pinned, other = torch.zeros(64 << 20, pin_memory=True), torch.zeros(64 << 20, device="cuda")
    busy, fresh = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    source, target = (floats(region).view(torch.uint8)[:SIZE] for region in regions)
    for number in range(20):
        source[:] = number
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            other.copy_(pinned, non_blocking=True)
        assert own_pair.ends(start(own_pair.peer.worker, whole()))[0].error == ""
        with torch.cuda.stream(fresh):
            assert bool((target == number).all())


def test_every_id_appears_exactly_once(pair: Pair) -> None:
    moves = [pair.engine.read(pair.peer.worker, random_ranges(seed, 20, 9000)) for seed in range(30)]
    assert len(set(moves)) == len(moves)
    assert Counter(completion.id for completion in pair.ends(*moves)) == Counter(moves)
    time.sleep(0.05)
    assert pair.engine.poll() == []


def test_a_cancelled_move_still_appears_and_then_rests(pair: Pair) -> None:
    moves = [pair.engine.read(pair.peer.worker, whole()) for _ in range(5)]
    for move in moves[1:]:
        pair.engine.cancel(move)
    first, *_ = pair.ends(*moves)
    assert first.error == ""
    pair.memory[:] = 3
    time.sleep(0.05)
    assert np.all(pair.memory == 3)


def test_cancel_after_the_end_is_harmless(pair: Pair) -> None:
    move = pair.engine.read(pair.peer.worker, whole())
    assert pair.ends(move)[0].error == ""
    pair.engine.cancel(move)
    pair.engine.cancel(MoveId(10**9))
    assert pair.ends(pair.engine.read(pair.peer.worker, whole()))[0].error == ""


def test_removing_a_peer_ends_its_moves(pair: Pair) -> None:
    moves = [pair.engine.read(pair.peer.worker, whole()) for _ in range(50)]
    pair.engine.remove_peer(pair.peer.worker)
    assert pair.ends(*moves)[-1].error != ""
    pair.fails("read", whole())
    pair.engine.remove_peer(pair.peer.worker)  # harmless
    pair.engine.add_peer(pair.peer.worker, pair.peer.info)
    assert pair.ends(pair.engine.read(pair.peer.worker, whole()))[0].error == ""


def test_adding_a_known_peer_again_replaces_it(pair: Pair) -> None:
    pair.engine.add_peer(pair.peer.worker, pair.peer.info)
    pair.engine.add_peer(pair.peer.worker, pair.peer.info)
    assert pair.ends(pair.engine.read(pair.peer.worker, whole()))[0].error == ""


def test_a_failed_move_of_one_peer_leaves_others_alone(pair: Pair) -> None:
    stranger = new_worker_id("decode")
    with pytest.raises(TransferError, match="unknown peer"):
        pair.engine.read(stranger, whole())
    pair.engine.remove_peer(stranger)
    assert pair.ends(pair.engine.read(pair.peer.worker, whole()))[0].error == ""


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize(
    "ranges",
    [
        ranges_of((0, 0, SIZE + 1)),
        ranges_of((SIZE, 0, 1)),
        ranges_of((0, REMOTE_SIZE, 1)),
        ranges_of((0, REMOTE_SIZE - 5, 6)),
        ranges_of((-1, 0, 5)),
        ranges_of((0, -1, 5)),
        ranges_of((0, 0, -5)),
        ranges_of((2**63 - 1, 0, 2)),
        ranges_of((0, 2**63 - 5, 2**63 - 1)),
        ranges_of((0, 0, 8), (SIZE - 4, 0, 8)),
        np.zeros((3, 3), dtype=np.int32),
        np.zeros((3, 2), dtype=np.int64),
        np.zeros(3, dtype=np.int64),
    ],
    ids=lambda ranges: f"{ranges.dtype}{ranges.tolist()}",
)
def test_ranges_that_fit_no_region_are_refused(pair: Pair, call: str, ranges: Ranges) -> None:
    pair.fails(call, ranges)
    assert pair.engine.poll() == []


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"\xff" * 100, b"\x81\xa1", bytes(range(256)), b"\x93" + b"x" * 2000],
    ids=lambda info: f"{len(info)}",
)
def test_info_that_makes_no_sense_is_refused(pair: Pair, garbage: bytes) -> None:
    stranger = new_worker_id("decode")
    for info in (garbage, pair.peer.info[: len(pair.peer.info) // 2], pair.peer.info + garbage + b"\0"):
        with pytest.raises(TransferError):
            pair.engine.add_peer(stranger, info)
        with pytest.raises(TransferError, match="unknown peer"):
            pair.engine.read(stranger, whole())


def test_damaged_info_never_crashes(pair: Pair) -> None:
    """Where the damage cannot be seen at once the moves fail, or end when the peer is removed."""
    stranger = new_worker_id("decode")
    for position in range(0, len(pair.peer.info), 5):
        info = bytearray(pair.peer.info)
        info[position] ^= 0x55
        try:
            pair.engine.add_peer(stranger, bytes(info))
            move = pair.engine.read(stranger, ranges_of((0, 0, 1)))
        except TransferError:
            continue
        time.sleep(0.01)
        pair.engine.remove_peer(stranger)
        pair.ends(move)
    assert pair.ends(pair.engine.read(pair.peer.worker, whole()))[0].error == ""


def test_info_of_another_engine_is_refused() -> None:
    regions = [shared_region(1 << 16) for _ in range(3)]
    engines = [make_engine(name, new_worker_id("prefill")) for name in ("shm", "nixl", "mooncake")]
    for engine, region in zip(engines, regions, strict=True):
        engine.register(region)
    for engine in engines:
        for other in engines:
            if other is not engine:
                with pytest.raises(TransferError):
                    engine.add_peer(new_worker_id("decode"), other.local_info())
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("case", HERE, ids=name_of)
def test_nothing_works_before_register_and_a_second_register_is_refused(case: Case) -> None:
    network, worker = MemoryNetwork(), new_worker_id("prefill")
    engine: TransferEngine = (
        MemoryEngine(worker, network) if case.engine.startswith("memory") else engine_of(case.engine, worker)
    )
    for call in (
        engine.local_info,
        lambda: engine.add_peer(worker, b""),
        lambda: engine.read(worker, whole()),
        lambda: engine.write(worker, whole()),
    ):
        with pytest.raises(TransferError):
            call()
    engine.register(region_of(case.engine, 4096))
    with pytest.raises(TransferError):
        engine.register(region_of(case.engine, 4096))
    engine.close()


def test_close_reports_what_was_open_and_may_be_called_twice(own_pair: Pair) -> None:
    moves = [own_pair.engine.read(own_pair.peer.worker, whole()) for _ in range(100)]
    own_pair.engine.close()
    assert Counter(completion.id for completion in own_pair.engine.poll()) == Counter(moves)
    own_pair.engine.close()
    assert own_pair.engine.poll() == []
    own_pair.fails("read", whole())
    own_pair.memory[:] = 3
    time.sleep(0.05)
    assert np.all(own_pair.memory == 3)


def test_a_killed_peer_leaves_no_move_open(process_pair: Pair) -> None:
    pair = process_pair
    assert pair.ends(pair.engine.read(pair.peer.worker, whole()))[0].error == ""
    moves = [pair.engine.read(pair.peer.worker, whole()) for _ in range(20)]
    pair.process.kill()
    moves += [pair.engine.read(pair.peer.worker, whole()) for _ in range(2)]
    if pair.engine.mover is Mover.PRODUCER:
        moves.append(pair.engine.write(pair.peer.worker, whole()))
    last = pair.ends(*moves)[-1]
    assert last.error != "" or pair.engine.name in ("shm", "cuda_ipc")  # where the dead peer's memory stays readable


def test_a_peer_that_died_before_the_first_move_leaves_none_open(process_pair: Pair) -> None:
    pair, other = process_pair, new_worker_id("decode")
    pair.process.kill()
    pair.engine.add_peer(other, pair.peer.info)
    (completion,) = pair.ends(pair.engine.read(other, whole()))
    assert completion.error != "" or pair.engine.name == "cuda_ipc"  # the driver finds what this process has mapped before


def test_no_call_waits_for_a_peer_that_hangs(process_pair: Pair) -> None:
    pair, other = process_pair, new_worker_id("decode")
    engine, worker = pair.engine, pair.peer.worker
    pair.process.stop()
    moves: list[MoveId] = []

    def start(peer: WorkerId) -> None:
        moves.append(engine.read(peer, whole()))
        if engine.mover is Mover.PRODUCER:
            moves.append(engine.write(peer, whole()))

    for call in (
        lambda: start(worker),
        lambda: engine.add_peer(other, pair.peer.info),
        lambda: start(other),
        lambda: engine.cancel(moves[0]),
        lambda: engine.remove_peer(worker),
        lambda: engine.add_peer(worker, pair.peer.info),
        lambda: start(worker),
        lambda: engine.remove_peer(other),
    ):
        began = time.monotonic()
        call()
        assert time.monotonic() - began < CALL_S
    seen = [completion.id for completion in engine.poll()]
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 2 * CALL_S
    assert Counter(seen + [completion.id for completion in engine.poll()]) == Counter(moves)


def test_a_move_that_has_ended_rests_even_if_its_peer_hung(process_pair: Pair) -> None:
    """Bytes that a hung peer sends after it wakes up must not land in memory that was reported free."""
    pair = process_pair
    assert pair.ends(pair.engine.read(pair.peer.worker, ranges_of((0, 0, 1))))[0].error == ""
    pair.process.stop()
    move = pair.engine.read(pair.peer.worker, whole())
    time.sleep(0.1)
    pair.engine.remove_peer(pair.peer.worker)
    time.sleep(0.1)
    seen = pair.engine.poll()
    if seen:
        pair.memory[:] = 3
    pair.process.go_on()
    if not seen:
        seen = pair.ends(move)
        pair.memory[:] = 3
    time.sleep(0.3)
    assert [completion.id for completion in seen] == [move]
    assert np.all(pair.memory == 3)


def test_a_dead_memory_peer_fails_moves() -> None:
    network, dying = MemoryNetwork(), new_worker_id("decode")
    engine = FaultyEngine(new_worker_id("prefill"), network, faults=[Fate(), Fate(kills_peer=True)])
    peer = LocalPeer(FaultyEngine(dying, network), dying, shared_region(REMOTE_SIZE), seed=1)
    engine.register(shared_region(SIZE))
    engine.add_peer(dying, peer.info)
    assert ends_of(engine, engine.read(dying, whole()))[0].error == ""
    assert ends_of(engine, engine.read(dying, whole()))[0].error != ""
    assert ends_of(engine, engine.write(dying, whole()))[0].error != ""
