"""The memory engine, and the faults that tests play with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from memory_faults import Corruption, Fate, FaultyEngine, random_faults
from transfer_peers import LocalPeer, random_bytes, view

from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.transfer.engines.base import Completion, MoveId, Ranges, TransferError
from kvrelay.transfer.engines.memory import MemoryNetwork
from kvrelay.transfer.region import Region, shared_region

SIZE = 64 << 10
RANGES: Ranges = np.array([[0, 0, 1000], [2000, 4000, 1000]], dtype=np.int64)


class World:
    """One engine with faults and a peer without."""

    def __init__(self, faults: Iterable[Fate]) -> None:
        self.network = MemoryNetwork()
        self.there: WorkerId = new_worker_id("decode")
        self.peer = LocalPeer(FaultyEngine(self.there, self.network), self.there, shared_region(SIZE), seed=1)
        self.engine = FaultyEngine(new_worker_id("prefill"), self.network, faults=faults)
        self.region: Region = shared_region(SIZE)
        self.engine.register(self.region)
        self.engine.add_peer(self.there, self.peer.info)

    def read(self) -> MoveId:
        return self.engine.read(self.there, RANGES)

    def has_arrived(self) -> bool:
        return bool(np.array_equal(self._arrived(), self._sent()))

    def _arrived(self) -> list[int]:
        return [*view(self.region)[:1000].tolist(), *view(self.region)[2000:3000].tolist()]

    def _sent(self) -> list[int]:
        sent = random_bytes(SIZE, 1)
        return [*sent[:1000].tolist(), *sent[4000:5000].tolist()]


def scripted(*fates: Fate) -> World:
    return World(fates)


def test_without_faults_a_move_completes_at_the_next_poll() -> None:
    world = scripted()
    move = world.read()
    assert not world.has_arrived()  # as late as the contract allows
    assert world.engine.poll() == [Completion(move)]
    assert world.has_arrived()


def test_a_delayed_move_completes_after_so_many_polls() -> None:
    world = scripted(Fate(delay_polls=3))
    move = world.read()
    assert [world.engine.poll() for _ in range(5)] == [[], [], [], [Completion(move)], []]


@pytest.mark.parametrize("how", ["cancel", "remove", "close"])
def test_a_dropped_move_ends_only_by_force_and_then_rests(how: str) -> None:
    world = scripted(Fate(is_dropped=True))
    move = world.read()
    assert all(world.engine.poll() == [] for _ in range(1000))
    match how:
        case "cancel":
            world.engine.cancel(move)
        case "remove":
            world.engine.remove_peer(world.there)
        case "close":
            world.engine.close()
    (completion,) = world.engine.poll()
    assert (completion.id, completion.error != "") == (move, True)
    assert world.engine.poll() == []
    assert not world.has_arrived()


def test_a_copy_made_twice_is_reported_once() -> None:
    world = scripted(Fate(copies_twice=True, delay_polls=1))
    move = world.read()
    assert world.has_arrived()
    view(world.region)[:] = 0
    assert [world.engine.poll() for _ in range(3)] == [[], [Completion(move)], []]
    assert world.has_arrived()


def test_reported_corruption_fails_the_move_and_silent_corruption_does_not() -> None:
    world = scripted(Fate(corruption=Corruption.REPORTED), Fate(corruption=Corruption.SILENT))
    for is_reported in (True, False):
        move = world.read()
        (completion,) = world.engine.poll()
        assert (completion.id, completion.error != "") == (move, is_reported)
        assert not world.has_arrived()


def test_corruption_hits_the_target_of_a_write_not_its_source() -> None:
    world = scripted(Fate(corruption=Corruption.SILENT))
    world.engine.write(world.there, RANGES)
    assert [completion.error for completion in world.engine.poll()] == [""]
    assert np.flatnonzero(view(world.peer.region)[:1000]).tolist() == [0]
    assert not view(world.region).any()


def test_a_peer_that_dies_fails_moves_and_writes_nothing_more() -> None:
    world = scripted(Fate(delay_polls=2), Fate(kills_peer=True))
    moves = [world.read(), world.read()]
    completions = world.engine.poll()
    assert [completion.id for completion in completions] == moves
    assert all(completion.error for completion in completions)
    assert not world.has_arrived()
    with pytest.raises(TransferError):
        world.peer.engine.read(world.engine.worker, RANGES)
    assert world.peer.engine.poll() == []
    with pytest.raises(TransferError):
        world.engine.add_peer(world.there, world.peer.info)


def test_a_worker_killed_with_open_moves_never_reports_them() -> None:
    world = scripted(Fate(delay_polls=1))
    world.read()
    world.engine.die()
    assert [world.engine.poll() for _ in range(3)] == [[], [], []]
    assert not world.has_arrived()


def test_random_faults_repeat_with_their_seed_and_only_what_was_asked_for() -> None:
    def fates(seed: int) -> list[Fate]:
        return list(itertools.islice(random_faults(seed=seed, drop=0.3, delay=0.5, duplicate=0.2, corrupt=0.1), 200))

    assert fates(7) == fates(7)
    assert fates(7) != fates(8)
    assert 30 < sum(fate.is_dropped for fate in fates(7)) < 90
    assert not any(fate.kills_peer or fate.corruption is Corruption.SILENT for fate in fates(7))
    assert set(itertools.islice(random_faults(seed=1), 50)) == {Fate()}
