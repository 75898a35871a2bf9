"""What the engine says of its prefix cache is what is in it."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.memory import events as engine_events
from kvrelay.engine.memory.events import EventRecorder
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.wire.events import CacheEvent, Cleared, Removed, Stored
from tests.cache_life import CacheLife, apply, new_sequence


def recorder_of(*cached: tuple[bytes, bytes]) -> EventRecorder:
    return EventRecorder(lambda: cached, 10)


def test_neighbours_become_one_event_and_order_is_kept() -> None:
    recorder = recorder_of()
    assert not recorder
    recorder.stored([b"a"], b"root")
    recorder.stored([b"b"], b"a")
    recorder.stored([b"x"], b"root")
    recorder.removed([b"b"])
    recorder.removed([b"x"])
    recorder.stored([b"b"], b"a")
    assert recorder
    assert recorder.take() == [
        Stored(hashes=[b"a", b"b"], parent=b"root"),
        Stored(hashes=[b"x"], parent=b"root"),
        Removed(hashes=[b"b", b"x"]),
        Stored(hashes=[b"b"], parent=b"a"),
    ]
    assert not recorder
    assert recorder.take() == []


def test_a_recorder_that_nobody_asks_forgets_and_says_it_all_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "_MIN_PENDING", 4)
    recorder = recorder_of((b"a", b"root"), (b"b", b"a"))
    for _ in range(100):
        recorder.stored([b"c"], b"root")
        recorder.removed([b"c"])
    assert recorder.take() == [Cleared(), Stored(hashes=[b"a", b"b"], parent=b"root")]
    recorder.removed([b"b"])
    assert recorder.take() == [Removed(hashes=[b"b"])]


def test_a_cache_without_a_listener_records_nothing() -> None:
    kv = KVCache(num_blocks=8, block_size=2, prefix_cache=True, cache_seed="m")
    sequence = new_sequence([1, 2, 3, 4])
    assert kv.attach(sequence, headroom=0)
    kv.computed(sequence, 4)
    assert not kv.prefixes.recorder.is_heard
    assert len(kv.prefixes) == 2


def test_received_blocks_are_told_when_all_of_them_are_there() -> None:
    kv = KVCache(num_blocks=8, block_size=2, prefix_cache=True, cache_seed="m")
    recorder = kv.record_events()
    arriving, given_up = new_sequence([1, 2, 3, 4, 5]), new_sequence([7, 8, 9])
    for sequence in (arriving, given_up):
        assert kv.attach(sequence, headroom=0)
        kv.reserve(sequence)
    assert not recorder  # a transfer is writing into them
    kv.quarantine(given_up)
    assert not recorder
    kv.received(arriving, 5)
    (event,) = recorder.take()
    assert isinstance(event, Stored)
    assert event.hashes == arriving.hashes[:2]


@pytest.mark.parametrize("overflows", [False, True])
def test_events_add_up_to_the_cache(overflows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if overflows:
        monkeypatch.setattr(engine_events, "_MIN_PENDING", 1)
    life = CacheLife(random.Random(5), num_blocks=4 if overflows else 40)
    seen: set[bytes] = set()
    kinds: set[type[CacheEvent]] = set()
    for step in range(1500):
        life.step()
        if not overflows or step % 50 == 0:
            for event in life.recorder.take():
                kinds.add(type(event))
                apply(event, seen)
            assert seen == life.hashes()
    assert kinds >= {Stored, Cleared if overflows else Removed}
    life.kv.pool.check()
