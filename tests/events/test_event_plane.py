"""Publisher and subscriber over real sockets: late, lossy, interrupted and abused, and in step in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec
import pytest
import zmq
from patience import PATIENCE_S, eventually
from registry_records import make_record

from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.events import publisher as publisher_module
from kvrelay.events import subscriber as subscriber_module
from kvrelay.events.publisher import EventPublisher, PublisherSettings
from kvrelay.events.subscriber import EventSubscriber
from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.planes.curve import connecting
from kvrelay.router.event_feed import EventFeed
from kvrelay.router.outside import Outside
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.wire.codec import encode
from kvrelay.wire.events import Beat, CacheEvent, Cleared, Events, Removed, Replay, Snapshot, Stored, pack_events
from tests.cache_life import CacheLife

QUICK = PublisherSettings(beat_s=0.05)


class Owner:
    """Keeps what one subscriber says."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.said: list[str] = []
        self.problems: list[str] = []

    def happened(self, worker_id: WorkerId, event: CacheEvent) -> None:
        match event:
            case Stored():
                self.hashes.update(event.hashes)
            case Removed():
                self.hashes.difference_update(event.hashes)
            case Cleared():
                self.hashes.clear()

    def replaced(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        self.hashes = set(hashes)
        self.said.append("replaced")

    def gap(self, worker_id: WorkerId) -> None:
        self.said.append("gap")

    def repaired(self, worker_id: WorkerId, *, by_snapshot: bool) -> None:
        self.said.append("snapshot" if by_snapshot else "replay")

    def malformed(self, worker_id: WorkerId, reason: str) -> None:
        self.problems.append(reason)


class Deaf(EventSubscriber):
    """Drops what `drop` says."""

    drop: Callable[[list[bytes]], bool] = staticmethod(lambda frames: False)

    def _on_frames(self, frames: list[bytes]) -> None:
        if not type(self).drop(frames):
            super()._on_frames(frames)


class Plane:
    """One publisher and any number of subscribers, closed at the end."""

    def __init__(self) -> None:
        self._open: list[EventPublisher | EventSubscriber] = []

    def publisher(self, settings: PublisherSettings = QUICK, *, ports: tuple[int, int] = (0, 0)) -> EventPublisher:
        worker_id = new_worker_id("decode")
        publisher = EventPublisher(worker_id, host="127.0.0.1", events_port=ports[0], replay_port=ports[1], settings=settings)
        publisher.start()
        self._open.append(publisher)
        return publisher

    def subscribe(self, publisher: EventPublisher, kind: type[EventSubscriber] = Deaf) -> tuple[EventSubscriber, Owner]:
        owner = Owner()
        made = kind(publisher._worker_id, publisher.events_address, publisher.replay_address, owner)
        self._open.append(made)
        return made, owner

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    monkeypatch.setattr(Deaf, "drop", staticmethod(lambda frames: False))
    monkeypatch.setattr(subscriber_module, "_FIRST_PAUSE_S", 0.02)
    made = Plane()
    yield made
    made.close()


def stored(*names: str) -> list[CacheEvent]:
    return [Stored(hashes=[name.encode() for name in names], parent=b"root")]


def removed(*names: str) -> list[CacheEvent]:
    return [Removed(hashes=[name.encode() for name in names])]


async def test_a_subscriber_follows_in_order(plane: Plane) -> None:
    publisher = plane.publisher()
    subscriber, owner = plane.subscribe(publisher)
    await eventually(lambda: subscriber.in_step)
    publisher.publish(stored("a", "b"))
    publisher.publish(removed("b"))
    publisher.publish([*stored("b"), Cleared(), *stored("c")])
    await eventually(lambda: subscriber.sequence == 3)
    assert owner.hashes == {b"c"}
    assert owner.said == []
    assert owner.problems == []


async def test_one_that_joins_late_has_everything(plane: Plane) -> None:
    publisher = plane.publisher()
    publisher.publish(stored("a", "b"))
    publisher.publish(removed("a"))
    subscriber, owner = plane.subscribe(publisher)
    await eventually(lambda: subscriber.in_step and subscriber.sequence == 2)
    assert owner.hashes == {b"b"}
    assert owner.said == []  # replayed from the first batch on


async def test_one_that_joins_after_the_ring_is_over_gets_a_snapshot(plane: Plane) -> None:
    publisher = plane.publisher(PublisherSettings(beat_s=0.05, ring_batches=3))
    for number in range(10):
        publisher.publish(stored(f"block {number}"))
    publisher.publish(removed("block 0"))
    await eventually(lambda: publisher._sequence == 11)  # its thread has got so far
    subscriber, owner = plane.subscribe(publisher)
    await eventually(lambda: subscriber.in_step)
    assert (subscriber.sequence, owner.said) == (11, ["replaced"])
    assert owner.hashes == {f"block {number}".encode() for number in range(1, 10)}
    publisher.publish(stored("later"))
    await eventually(lambda: b"later" in owner.hashes)


async def test_a_long_history_of_a_small_cache_comes_as_a_snapshot(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_CHEAP_REPLAY_BYTES", 2000)
    publisher = plane.publisher()
    for _ in range(200):
        publisher.publish([*stored("a"), *removed("a")])
    publisher.publish(stored("a"))
    await eventually(lambda: publisher._sequence == 201)
    subscriber, owner = plane.subscribe(publisher)
    await eventually(lambda: subscriber.in_step)
    assert owner.hashes == {b"a"}
    assert owner.said == ["replaced"]


@pytest.mark.parametrize("ring", [100, 2])
async def test_a_gap_is_noticed_and_closed(plane: Plane, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = plane.publisher(PublisherSettings(beat_s=0.05, ring_batches=ring))
    subscriber, owner = plane.subscribe(publisher)
    await eventually(lambda: subscriber.in_step)
    lost = {2, 3, 4}
    monkeypatch.setattr(Deaf, "drop", staticmethod(lambda frames: len(frames) == 1 and number_of(frames[0]) in lost))
    for number in range(1, 7):
        publisher.publish(stored(f"block {number}"))
        await eventually(lambda number=number: subscriber._latest >= number or number in lost)
    await eventually(lambda: subscriber.in_step and subscriber.sequence == 6)
    assert len(owner.hashes) == 6
    assert owner.said[0] == "gap"
    assert owner.said[-1] == ("replay" if ring == 100 else "snapshot")


def number_of(frame: bytes) -> int:
    """Of a batch; 0 for anything else."""
    message = msgspec.msgpack.decode(frame)
    return int(message["sequence"]) if message["type"] == "Events" else 0


async def test_a_lost_last_batch_is_noticed_by_the_beat(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = plane.publisher()
    subscriber, owner = plane.subscribe(publisher)
    await eventually(lambda: subscriber.in_step)
    monkeypatch.setattr(Deaf, "drop", staticmethod(lambda frames: len(frames) == 1 and number_of(frames[0]) == 1))
    publisher.publish(stored("a"))
    await eventually(lambda: b"a" in owner.hashes)
    await eventually(lambda: owner.said == ["gap", "replay"])


async def test_asking_goes_on_until_it_is_answered(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = plane.publisher()
    publisher.publish(stored("a"))
    refused: list[int] = []

    def deaf(frames: list[bytes]) -> bool:
        refused.append(len(frames))
        return len(refused) < 5

    monkeypatch.setattr(Deaf, "drop", staticmethod(deaf))
    subscriber, owner = plane.subscribe(publisher)
    await eventually(lambda: subscriber.in_step)
    assert owner.hashes == {b"a"}


async def test_what_is_not_repaired_for_long_is_dropped_and_comes_back(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = plane.publisher()
    subscriber, owner = plane.subscribe(publisher)
    publisher.publish(stored("a"))
    await eventually(lambda: subscriber.in_step and subscriber.sequence == 1)
    monkeypatch.setattr(subscriber_module, "_GIVE_UP_S", 0.1)
    monkeypatch.setattr(Deaf, "drop", staticmethod(lambda frames: len(frames) > 1 or number_of(frames[0]) == 2))
    publisher.publish(stored("b"))
    await eventually(lambda: not owner.hashes and not subscriber.in_step)
    monkeypatch.setattr(Deaf, "drop", staticmethod(lambda frames: False))
    await eventually(lambda: subscriber.in_step)
    assert owner.hashes == {b"a", b"b"}


async def test_a_restarted_worker_on_the_same_ports_is_another_worker(plane: Plane) -> None:
    publisher = plane.publisher()
    subscriber, owner = plane.subscribe(publisher)
    publisher.publish(stored("a"))
    await eventually(lambda: subscriber.in_step and b"a" in owner.hashes)
    ports = tuple(int(address.rpartition(":")[2]) for address in (publisher.events_address, publisher.replay_address))
    publisher.close()
    plane._open.remove(publisher)
    again = await rebound(plane, (ports[0], ports[1]))
    again.publish(stored("z"))
    await eventually(lambda: bool(owner.problems))  # the old subscription hears the new worker, and does not believe it
    assert owner.hashes == {b"a"}
    fresh, fresh_owner = plane.subscribe(again)
    await eventually(lambda: fresh.in_step and fresh.sequence == 1)
    assert fresh_owner.hashes == {b"z"}


async def rebound(plane: Plane, ports: tuple[int, int]) -> EventPublisher:
    """The old sockets may take a moment to go."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return plane.publisher(ports=ports)
            except ConfigError:
                await asyncio.sleep(0.02)


def test_a_port_that_is_taken_is_named() -> None:
    first = EventPublisher(new_worker_id("decode"), host="127.0.0.1")
    port = int(first.replay_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="--replay-port"):
        EventPublisher(new_worker_id("decode"), host="127.0.0.1", replay_port=port)
    first.close()


async def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no address"):
        EventSubscriber(new_worker_id("decode"), "tcp://127.0.0.1:1", "nonsense", Owner())


def test_kinds_of_events_of_a_later_version_are_skipped() -> None:
    class Migrated(msgspec.Struct, frozen=True, tag=True):
        request: str

    subscriber, owner = unconnected()
    later = msgspec.Raw(msgspec.msgpack.encode(Migrated("cmpl-1")))
    for number, events in enumerate([pack_events(stored("a")), [later], [later, *pack_events(stored("b"))]]):
        batch = Events(worker_id=subscriber._worker_id, sequence=number + 1, events=events)
        subscriber._on_frames([encode(batch)])
    assert (subscriber.sequence, owner.hashes, owner.problems) == (3, {b"a", b"b"}, [])


def test_a_malformed_event_is_not_taken_for_one_of_a_later_version() -> None:
    subscriber, owner = unconnected()
    for broken in ({"type": "Stored", "hashes": 3}, {"hashes": []}, 7):
        batch = Events(worker_id=subscriber._worker_id, sequence=1, events=[msgspec.Raw(msgspec.msgpack.encode(broken))])
        subscriber._on_frames([encode(batch)])
    assert (subscriber.sequence, len(owner.problems)) == (0, 3)


def unconnected() -> tuple[EventSubscriber, Owner]:
    """Takes frames by hand."""

    async def make() -> tuple[EventSubscriber, Owner]:
        return _made_and_closed()

    return asyncio.run(make())


def _made_and_closed() -> tuple[EventSubscriber, Owner]:
    owner = Owner()
    made = EventSubscriber(new_worker_id("decode"), "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", owner)
    made.close()
    return made, owner


def garbage(rng: random.Random, worker_id: WorkerId) -> bytes:
    real = [
        encode(Replay(worker_id=worker_id, first=rng.choice([-(2**62), -1, 0, 2**40, 2**62]))),
        encode(Replay(worker_id=WorkerId("decode-x"), first=1)),
        encode(Replay(worker_id=worker_id, first=1, version=99)),
        encode(Beat(worker_id=worker_id, sequence=rng.randrange(-5, 5))),
        encode(Events(worker_id=worker_id, sequence=rng.randrange(-5, 5), events=[msgspec.Raw(b"\x01")])),
        encode(Snapshot(worker_id=worker_id, sequence=-1, hashes=[b"x"])),
        encode(Beat(worker_id=WorkerId("decode-000000000000"), sequence=1)),
        encode(Beat(worker_id=worker_id, sequence=1, version=0)),
    ]
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return rng.choice(real)
    frame = bytearray(rng.choice(real))
    if kind == 2:
        frame[rng.randrange(len(frame))] = rng.randrange(256)
        return bytes(frame)
    return bytes(frame[: rng.randrange(len(frame))])


async def test_garbage_on_the_replay_socket_changes_nothing(plane: Plane) -> None:
    publisher = plane.publisher()
    rng = random.Random(3)
    stranger = connecting(zmq.DEALER)
    stranger.setsockopt(zmq.SNDHWM, 0)
    stranger.connect(publisher.replay_address)
    for _ in range(10_000):
        stranger.send_multipart([garbage(rng, publisher._worker_id) for _ in range(rng.choice([1, 1, 1, 2, 3]))])
    raw = connecting(zmq.STREAM)  # bytes that are not even ZMQ, on both ports
    for address in (publisher.replay_address, publisher.events_address):
        raw.connect(address)
        raw.send_multipart([raw.getsockopt(zmq.IDENTITY), rng.randbytes(500)])
    noise = connecting(zmq.SUB)  # subscriptions are all that a publisher takes
    noise.connect(publisher.events_address)
    for _ in range(100):
        noise.setsockopt(zmq.SUBSCRIBE, rng.randbytes(rng.randrange(50)))
    subscriber, owner = plane.subscribe(publisher)
    publisher.publish(stored("a"))
    await eventually(lambda: subscriber.in_step and b"a" in owner.hashes)
    await eventually(lambda: publisher.num_malformed > 3000)
    for socket in (stranger, raw, noise):
        socket.close()


async def test_garbage_from_a_publisher_changes_nothing() -> None:
    subscriber, owner = _made_and_closed()  # on a running loop: garbage may make it ask
    rng = random.Random(4)
    for _ in range(10_000):
        subscriber._on_frames([garbage(rng, subscriber._worker_id)])
    assert owner.hashes <= {b"x"}  # one changed byte can make a good snapshot
    assert len(owner.problems) > 3000
    latest = subscriber._latest
    snapshot = Snapshot(worker_id=subscriber._worker_id, sequence=max(latest, subscriber.sequence) + 1, hashes=[b"a"])
    subscriber.in_step = False
    subscriber._on_frames([encode(snapshot)])
    subscriber._stop_asking()
    assert owner.hashes == {b"a"}


async def test_an_oversized_message_costs_its_sender_the_connection_and_nobody_else(plane: Plane) -> None:
    publisher = plane.publisher()
    stranger = connecting(zmq.DEALER)
    stranger.connect(publisher.replay_address)
    stranger.send(bytes(1 << 20))
    subscriber, owner = plane.subscribe(publisher)
    publisher.publish(stored("a"))
    await eventually(lambda: subscriber.in_step and b"a" in owner.hashes)
    assert publisher.num_malformed == 0
    stranger.close()


async def test_a_publisher_that_is_behind_says_so(plane: Plane) -> None:
    publisher = EventPublisher(new_worker_id("decode"), host="127.0.0.1", settings=PublisherSettings(queue_batches=2))
    assert publisher.has_room
    publisher.publish(stored("a"))
    publisher.publish(stored("b"))
    assert not publisher.has_room
    publisher.start()
    await eventually(lambda: publisher.has_room)
    publisher.close()


class Lossy(EventSubscriber):
    """Loses a fifth of everything, both ways."""

    rng = random.Random(11)

    def _on_frames(self, frames: list[bytes]) -> None:
        if self.rng.random() >= 0.2:
            super()._on_frames(frames)

    def _ask(self) -> None:
        if self.rng.random() >= 0.2:
            super()._ask()
        else:
            self._timer = self._loop.call_later(self._pause_s, self._ask_again)


async def test_the_index_is_the_union_of_the_caches_though_a_fifth_of_the_events_is_lost(plane: Plane) -> None:
    """10,000 operations on the caches of four workers, of which one is replaced halfway."""
    rng = random.Random(7)
    index, metrics = PrefixIndex(), Metrics()
    feed = EventFeed(index, metrics, outside=Outside(subscribe=Lossy))
    settings = PublisherSettings(beat_s=0.05, ring_batches=8)
    lives: dict[WorkerId, tuple[CacheLife, EventPublisher]] = {}

    def join() -> None:
        publisher = plane.publisher(settings)
        lives[publisher._worker_id] = (CacheLife(rng, num_blocks=120), publisher)
        feed.joined(
            make_record(
                id=publisher._worker_id,
                events_address=publisher.events_address,
                replay_address=publisher.replay_address,
                block_size=4,
            )
        )

    for _ in range(4):
        join()
    for operation in range(10_000):
        life, publisher = rng.choice(list(lives.values()))
        life.step()
        if life.recorder and publisher.has_room:
            publisher.publish(life.recorder.take())
        if operation % 20 == 0:
            await asyncio.sleep(0.001)
        if operation == 5_000:
            gone = next(iter(lives))
            del lives[gone]
            feed.left(gone)
            assert index.hashes(gone) == frozenset()
            join()
    for life, publisher in lives.values():
        life.kv.pool.check()
        await eventually(lambda publisher=publisher: publisher.has_room)
        publisher.publish(life.recorder.take())
    for worker_id, (life, _) in lives.items():
        expected = life.hashes()
        assert len(expected) > 50
        await eventually(lambda worker_id=worker_id, expected=expected: index.hashes(worker_id) == expected)
    assert len(index) == len(set().union(*(life.hashes() for life, _ in lives.values())))
    counts = {
        sample.name + str(sample.labels): sample.value for metric in metrics.registry.collect() for sample in metric.samples
    }
    assert counts["kvrelay_event_gaps_total{}"] > 20
    assert counts["kvrelay_event_repairs_total{'by': 'replay'}"] > 0
    assert counts["kvrelay_event_repairs_total{'by': 'snapshot'}"] > 0
    assert counts["kvrelay_prefix_index_blocks{}"] == len(index)
    feed.close()
    assert len(index) == 0
