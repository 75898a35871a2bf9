"""What a user sees of a request that two workers serve: states, log lines, metrics, and its timeline."""

from __future__ import annotations

import logging

import image_cluster
import msgspec
import pytest
import zmq
from cluster import Cluster, Shape, ask, collect, relay
from prometheus_client.parser import text_string_to_metric_families
from vision_models import make_prompt

from kvrelay.ids import new_request_id, new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.planes.curve import listening
from kvrelay.router.timelines import ClockOffset, Timeline, Timelines
from kvrelay.states import Role, Stage
from kvrelay.wire.registry import MappingCounts
from kvrelay.wire.serving import LegTimes, ToWorker
from kvrelay.wire.timelines import TimelineShown

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PROMPT = list(range(10, 60))


def lines_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, object]]:
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == message]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("kvrelay"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvrelay")
    return caplog


def samples(cluster: Cluster, name: str) -> dict[str, float]:
    """Of a metric by worker, as a scraper reads it."""
    page = cluster.router._metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return {sample.labels["worker"]: sample.value for sample in families[name].samples}


async def test_a_prefill_worker_is_transferring_while_it_hands_on_and_its_mapping_is_exported() -> None:
    async with relay(Shape()) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        decode.allow(0)
        stream = cluster.submit(ask(PROMPT))

        def is_handing_on() -> bool:
            load = prefill.engine.load()
            return load.transferring == 1 and load.running == 0

        await cluster.until(is_handing_on)

        def shown() -> dict[str, int]:
            return next(one for one in cluster.router.cluster()["workers"] if one["id"] == prefill.id)

        await cluster.until(lambda: shown()["transferring"] == 1)
        await cluster.until(lambda: samples(cluster, "kvrelay_worker_mapping_size")[prefill.id] == 1)
        decode.allow(None)
        assert (await collect(stream)).error is None
        await cluster.idle()
        await cluster.until(lambda: samples(cluster, "kvrelay_worker_mapping_size")[prefill.id] == 0)
        peer = cluster.router._peers[prefill.id]
        peer.load = msgspec.structs.replace(peer.load, mapping=MappingCounts(duplicates=4))
        assert samples(cluster, "kvrelay_worker_mapping_duplicates")[prefill.id] == 4


async def test_what_a_prefill_worker_says_before_the_request_has_come_is_seen_as_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with relay(Shape()) as cluster:
        (decode,) = cluster.decode
        assert (await cluster.answer(ask(PROMPT))).error is None  # the two know each other
        await cluster.idle()
        peer, late = cluster.router._peers[decode.id], list[ToWorker]()
        with monkeypatch.context() as patch:
            patch.setattr(peer, "send", lambda message: late.append(message) is None)
            stream = cluster.submit(ask(PROMPT[1:]))

            def is_seen() -> bool:
                decode.loop.wake()  # it has no news, and would tell this a little later
                return samples(cluster, "kvrelay_worker_mapping_held_back")[decode.id] == 1

            await cluster.until(is_seen)
        for message in late:
            peer.send(message)
        assert (await collect(stream)).error is None
        await cluster.until(lambda: samples(cluster, "kvrelay_worker_mapping_held_back")[decode.id] == 0)


async def test_what_a_decode_worker_has_to_say_again_is_exported() -> None:
    async with relay(Shape()) as cluster:
        (prefill,), (decode,), mute = cluster.prefill, cluster.decode, listening(zmq.ROUTER)
        address = f"tcp://127.0.0.1:{mute.bind_to_random_port('tcp://127.0.0.1')}"
        peer = cluster.router._peers[prefill.id]
        peer.record = msgspec.structs.replace(peer.record, signal_address=address)
        stream = cluster.submit(ask(PROMPT))
        await cluster.until(lambda: samples(cluster, "kvrelay_worker_transfers_repeats")[decode.id] >= 2)
        assert samples(cluster, "kvrelay_worker_transfers_repeats")[prefill.id] == 0
        stream.abort()
        mute.close()
        await cluster.idle()


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_a_hand_over_is_one_line_on_each_worker_with_ids_numbers_and_the_clients_trace(
    lines: pytest.LogCaptureFixture, mode: str
) -> None:
    async with relay(Shape(mode=mode)) as cluster:  # type: ignore[arg-type]
        trace = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        stream = cluster.submit(msgspec.structs.replace(ask(PROMPT), trace=trace))
        assert (await collect(stream)).error is None
        await cluster.idle()
        await cluster.until(lambda: bool(lines_of(lines, "KV taken over")))  # it is written last
        (taken,), (handed,) = lines_of(lines, "KV taken over"), lines_of(lines, "KV handed over")
        for line in (taken, handed):
            assert line["transfer"] == stream.transfer_id
            assert line["trace"] == TRACE_ID
            assert line["tokens"] == len(PROMPT)
            assert isinstance(line["ms"], float)
        assert taken["request"] == stream.request_id != handed["request"]
        token_bytes = cluster.decode[0].engine.core.incoming.consumer._turns.machine.desk.layout.all_heads_bytes  # type: ignore[attr-defined]
        assert taken["bytes"] == handed["bytes"] == len(PROMPT) * token_bytes > 0


@pytest.mark.parametrize(
    ("room", "said", "level", "rounds"),
    [
        (256, "embedding taken over", logging.INFO, {}),
        (3, "an embedding came in several rounds", logging.WARNING, {"first_round": 3, "resumes": 1}),
    ],
    ids=["at_once", "in_rounds"],
)
async def test_an_embedding_is_one_line_on_each_worker_with_the_clients_trace(
    lines: pytest.LogCaptureFixture, room: int, said: str, level: int, rounds: dict[str, int]
) -> None:
    prompt = make_prompt("qwen3_vl", [(70, 50)], "What is it?")
    shape = image_cluster.Shape(encode=1, prefill=1, decode=1, transfer={"embedding_buffer_tokens": room})
    async with image_cluster.images(shape) as cluster:
        trace = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        await cluster.answer(msgspec.structs.replace(image_cluster.ask(prompt), trace=trace))
        await cluster.idle()
        (taken,), (handed,) = lines_of(lines, said), lines_of(lines, "embedding handed over")
        assert [record.levelno for record in lines.records if record.getMessage() == said] == [level]
        assert {name: taken[name] for name in ("first_round", "resumes") if name in taken} == rounds
        assert taken["transfer"] == handed["transfer"]
        assert (
            taken["bytes"]
            == handed["bytes"]
            == cluster.encode.engine._producer._pool.layout.size_of(prompt.images[0].num_tokens)
        )
        for line in (taken, handed):
            assert line["trace"] == TRACE_ID
            assert line["tokens"] == prompt.images[0].num_tokens
            assert isinstance(line["ms"], float)


async def test_the_timeline_of_a_request_has_the_stages_of_both_workers_in_order() -> None:
    async with relay(Shape()) as cluster:
        stream = cluster.submit(msgspec.structs.replace(ask(PROMPT), external_id="mine"))
        (running,) = cluster.router.timelines.about("", "mine", 0)
        assert running.state == "running"
        assert {worker.role for worker in running.workers} == {"prefill", "decode"}
        assert (await collect(stream)).error is None
        await cluster.idle()

        def line() -> TimelineShown:
            (found,) = cluster.router.timelines.about("", "mine", 0)
            return found

        await cluster.until(lambda: len(line().clocks) == 2)
        shown = line()
        stages = shown.stages
        by_role = {role: [one.stage for one in stages if one.role == role] for role in ("router", "prefill", "decode")}
        assert by_role == {
            "router": ["route"],
            "prefill": ["queue", "prefill", "hand_over"],
            "decode": ["reserve", "transfer", "decode"],
        }
        assert (shown.state, shown.prompt_tokens, shown.output_tokens) == ("finished", len(PROMPT), 8)
        assert shown.transfer_id == stream.transfer_id
        assert all(one.ms >= 0.0 for one in stages)
        assert {one.worker for one in stages} - {""} == {worker.id for worker in cluster.workers}
        counted = {
            sample.labels["role"]: sample.value
            for family in cluster.router._metrics.hand_over_seconds.collect()
            for sample in family.samples
            if sample.name.endswith("_count")
        }
        assert counted == {"prefill": 1.0}
        assert cluster.router.timelines.latest("", 5)[0].id == "mine"
        assert not cluster.router.timelines.latest("another key", 5)


async def test_a_running_request_shows_how_far_it_has_come() -> None:
    async with relay(Shape()) as cluster:
        (decode,), timelines, seen = cluster.decode, cluster.router.timelines, dict[int, tuple[object, ...]]()
        decode.allow(3)
        stream = cluster.submit(msgspec.structs.replace(ask(PROMPT), external_id="far"))
        (waiting,) = timelines.changed("", 5, seen)
        assert (waiting.state, waiting.output_tokens, waiting.first_token_ms) == ("running", 0, None)
        await cluster.until(lambda: stream.num_tokens > 0)
        (begun,) = timelines.changed("", 5, seen)
        assert begun.state == "running"
        assert begun.output_tokens == stream.num_tokens
        assert begun.first_token_ms
        assert not timelines.changed("", 5, seen)
        decode.allow(None)
        assert (await collect(stream)).error is None


async def test_a_request_that_is_aborted_has_a_timeline_too() -> None:
    async with relay(Shape()) as cluster:
        for worker in cluster.workers:
            worker.allow(0)
        stream = cluster.submit(msgspec.structs.replace(ask(PROMPT), external_id="left"))
        await cluster.until(lambda: all(worker.engine.load().waiting == 1 for worker in cluster.workers))
        stream.abort()
        await cluster.until(lambda: not any(worker.engine.load().waiting for worker in cluster.workers))
        (shown,) = cluster.router.timelines.about("", "left", 0)
        assert shown.state == "aborted"
        for worker in cluster.workers:
            worker.allow(None)


def test_a_request_that_no_worker_takes_is_settled_too() -> None:
    timelines, settled = Timelines(Metrics()), list[Timeline]()
    timelines.on_settled = settled.append
    line = Timeline(external_id="refused")
    timelines.begin(line, 0.0)
    timelines.refused(line)
    timelines.tick(0.0)
    assert settled == [line]
    assert timelines.about("", "refused", 0)[0].state == "failed"


def test_stages_are_put_on_the_routers_clock_and_keep_their_own_length() -> None:
    now = 1000.0
    timelines = Timelines(Metrics(), clock=lambda: now)
    line = Timeline(external_id="far")
    timelines.begin(line, 0.0)
    worker, request_id = new_worker_id("whole"), new_request_id()
    timelines.sent(line, [(request_id, worker, Role.WHOLE)], 0, now)
    now = 1002.0  # the worker's clock says 1.0 when ours says 1000.1: it came 0.1 s after it was sent, and is told 0.1 s later
    timelines.told(worker, Role.WHOLE, LegTimes(request_id, [(Stage.QUEUE, 1.0), (Stage.DECODE, 1.5)], 2.8))
    (shown,) = timelines.about("", "far", 0)
    _, queue, decode = shown.stages
    assert (queue.ms, decode.ms) == (500.0, 1300.0), "its own time, to the digit"
    clock = shown.clocks[worker]
    assert clock.offset_ms == pytest.approx(999_100.0, abs=clock.error_ms + 1e-6)
    assert clock.error_ms == pytest.approx(100.0)
    assert queue.start_ms == pytest.approx(100.0, abs=clock.error_ms + 1e-6)


def test_bounds_of_an_offset_become_narrower_and_follow_a_clock_that_is_set() -> None:
    offset = ClockOffset()
    offset.note(4.0, 6.0, now=0.0)
    offset.note(4.9, 7.0, now=1.0)
    assert offset.offset_s == pytest.approx(5.45, abs=1e-3)
    assert offset.error_s == pytest.approx(0.55, abs=1e-3)
    offset.note(-3.0, -2.0, now=2.0)
    assert (offset.low, offset.high) == (-3.0, -2.0)


def test_as_many_timelines_are_kept_as_there_is_room_for() -> None:
    timelines = Timelines(Metrics(), capacity=3)
    lines = [Timeline(external_id=str(number)) for number in range(5)]
    for line in lines:
        timelines.begin(line, 0.0)
        timelines.sent(line, [(new_request_id(), new_worker_id("whole"), Role.WHOLE)], 0, 1.0)
    timelines.sent(lines[0], [(new_request_id(), new_worker_id("whole"), Role.WHOLE)], 1, 2.0)  # again, after it was forgotten
    assert [shown.id for shown in timelines.latest("", 10)] == ["4", "3", "2"]
    assert len(timelines) == len(timelines._legs) == 3
    timelines.told(new_worker_id("whole"), Role.WHOLE, LegTimes(new_request_id(), [(Stage.QUEUE, 1.0)], 2.0))  # not known
    timelines.told(new_worker_id("whole"), Role.WHOLE, LegTimes(new_request_id(), [], 2.0))
