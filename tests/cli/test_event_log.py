"""`kvrelay events`: what it prints of a worker's events, where it finds workers, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from stub_worker import StubWorker

from kvrelay.cli import events as event_log
from kvrelay.errors import ConfigError
from kvrelay.events.publisher import EventPublisher
from kvrelay.ids import new_worker_id
from kvrelay.planes import cluster_key
from kvrelay.planes.curve import keyed
from kvrelay.states import FreeReason
from kvrelay.wire.events import CacheEvent, Cleared, Freed, FreedForNow, Removed, Restored, Stored, Swapped

BLOCKS = [bytes([number]) * 16 for number in range(6)]
LIFE: list[CacheEvent] = [
    Stored(hashes=BLOCKS, parent=b"root"),
    Swapped(request="a", num_blocks=2),
    Restored(request="a", num_blocks=2),
    FreedForNow(request="a", reason=FreeReason.NO_SWAP_ROOM),
    Freed(request="a", reason=FreeReason.FINISHED, hashes=BLOCKS[:2]),
    Removed(hashes=BLOCKS[5:]),
    Cleared(),
]


class Printed:
    """A running `kvrelay events`, and the lines it has printed."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvrelay", "events", "--json", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """The lines up to the first that fits."""
        assert self._process.stdout is not None
        lines: list[dict[str, Any]] = []
        patience = threading.Timer(60.0, self._process.kill)
        patience.start()
        for text in self._process.stdout:
            lines.append(json.loads(text))
            if condition(lines[-1]):
                patience.cancel()
                return lines
        raise AssertionError(f"it ended after {lines}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def publishing_worker() -> Iterator[tuple[StubWorker, EventPublisher]]:
    """One that routers and others can greet, and that says what it is told to."""
    worker = StubWorker("")
    publisher = EventPublisher(worker.id, host="127.0.0.1")
    publisher.start()
    addresses = {"events_address": publisher.events_address, "replay_address": publisher.replay_address}
    worker.loop.record = msgspec.structs.replace(worker.record, **addresses)
    try:
        yield worker, publisher
    finally:
        publisher.close()
        worker.stop()


def test_it_prints_a_workers_events_with_the_cluster_key(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "cluster.key"
    cluster_key.write_new_key(file)
    with keyed(cluster_key.load_key(str(file))), publishing_worker() as (worker, publisher):
        publisher.publish(LIFE)
        published_at = time.time()
        time.sleep(0.5)  # the events are older than their reader
        printed = Printed("--worker", worker.address, "--cluster-key", str(file))
        try:
            lines = printed.until(lambda line: line["type"] == "Cleared")
        finally:
            printed.close()
    assert {line["worker"] for line in lines} == {worker.id}
    assert lines[0]["time"] > published_at + 0.5
    assert {line["time"] < published_at + 0.4 for line in lines[1:]} == {True}
    assert len({line["time"] for line in lines[1:]}) == 1
    kinds = ["Joined", "Stored", "Swapped", "Restored", "FreedForNow", "Freed", "Removed", "Cleared"]
    assert [line["type"] for line in lines] == kinds
    assert lines[1]["hashes"] == [block.hex() for block in BLOCKS]
    assert (lines[4]["request"], lines[4]["reason"]) == ("a", "no_swap_room")
    assert (lines[5]["reason"], lines[5]["hashes"]) == ("finished", [block.hex() for block in BLOCKS[:2]])


def test_lines_for_people_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    listener = event_log.Listener(event_log.TextLines())
    worker_id = new_worker_id("decode")
    listener.happened(worker_id, Stored(hashes=BLOCKS, parent=b""))
    listener.happened(worker_id, Freed(request="a", reason=FreeReason.FINISHED, hashes=[]))
    listener.happened(worker_id, Swapped(request="a", num_blocks=2))
    listener.happened(worker_id, Cleared())
    lines = [line.partition(worker_id)[2].split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["Stored", "blocks=6", "00000000", "01010101", "02020202", "03030303", "..."],
        ["Freed", "request=a", "reason=finished", "blocks=0"],
        ["Swapped", "request=a", "num_blocks=2"],
        ["Cleared"],
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--registry", "tcp://127.0.0.1:1"], "use --url"),
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--worker", "tcp://127.0.0.1:1", "--url", "http://127.0.0.1:9"], "not allowed with"),
        (["--cluster-key", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_work_is_said(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        event_log.run(arguments)
