"""Full pools, slow transports and workers that fail: everything still ends, in order and with the right tokens."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from cluster import Answer, Cluster, Shape, Worker, ask, collect, random_prompts, relay, solo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.engine.interfaces import StepPlan
from kvrelay.errors import InvalidRequestError
from kvrelay.router.backend import GenerateRequest
from kvrelay.states import FinishReason
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferEngine

SMALL = {"prefill": 2, "decode": 2, "max_model_len": 64, "num_blocks": (8, 8), "token_budget": 32, "max_batch": 4}
NUM_REQUESTS = 50


def requests_for_small_pools(seed: int, count: int = NUM_REQUESTS) -> list[GenerateRequest]:
    """Each fills half of a pool of 8 blocks when it ends."""
    rng = random.Random(seed)
    prompts = random_prompts(count, seed, longest=48)
    return [ask(prompt, max_tokens=rng.randint(2, 14)) for prompt in prompts]


async def through_small_pools(seed: int, shape: Shape, pauses: list[float]) -> Cluster:
    requests = requests_for_small_pools(seed)
    expected = solo(requests, shape)
    async with relay(shape) as cluster:
        tasks = []
        for index, request in enumerate(requests):
            tasks.append(asyncio.create_task(cluster.answer(request)))
            await asyncio.sleep(pauses[index % len(pauses)])
        for answer, wanted in zip(await asyncio.gather(*tasks), expected, strict=True):
            assert answer.said == wanted.said
    return cluster


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_pools_that_hold_two_requests_never_wait_for_each_other(mode: str, seed: int) -> None:
    await through_small_pools(seed, Shape(mode=mode, **SMALL), [0.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_nor_with_a_seed_that_was_never_tried(mode: str) -> None:
    """KVRELAY_PRESSURE_SEED repeats one that failed."""
    seed = int(os.environ.get("KVRELAY_PRESSURE_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVRELAY_PRESSURE_SEED={seed}")  # shown where the test fails
    draw = random.Random(seed)
    pauses = [draw.choice([0.0, 0.0, 0.001, 0.01]) for _ in range(draw.randint(1, 8))]
    await through_small_pools(seed, Shape(mode=mode, **SMALL), pauses)  # type: ignore[arg-type]


@pytest.mark.parametrize("transfer", ["nixl", pytest.param("mooncake", marks=pytest.mark.long)])
async def test_nor_where_the_producer_writes(transfer: str) -> None:
    await through_small_pools(4, Shape(transfer=transfer, **SMALL), [0.0, 0.002])  # type: ignore[arg-type]


def in_a_loop_of_its_own(seed: int, mode: str, pauses: list[float]) -> None:
    asyncio.run(through_small_pools(seed, Shape(mode=mode, **SMALL), pauses))  # type: ignore[arg-type]


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["write", "read"]),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.01]), min_size=1, max_size=8),
)
def test_any_arrivals_at_small_pools_end(seed: int, mode: str, pauses: list[float]) -> None:
    in_a_loop_of_its_own(seed, mode, pauses)


@pytest.mark.long
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 1_000_000),
    mode=st.sampled_from(["write", "read"]),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.01]), min_size=1, max_size=8),
)
def test_any_arrivals_at_small_pools_end_many_times(seed: int, mode: str, pauses: list[float]) -> None:
    in_a_loop_of_its_own(seed, mode, pauses)


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_a_full_prefill_worker_sets_aside_what_is_not_taken_and_computes_it_again(mode: str) -> None:
    """The decode worker does not step, so it reserves nothing; the prefill worker's pool holds two prompts."""
    shape = Shape(mode=mode, num_blocks=(8, 64), max_model_len=128, prefix_cache=False)  # type: ignore[arg-type]
    requests = [ask([number] * 50) for number in range(1, 7)]
    async with relay(shape) as cluster:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        decode.allow(0)
        streams = [cluster.submit(request) for request in requests]
        answers = [Answer() for _ in requests]
        for stream, answer in zip(streams, answers, strict=True):
            answer.take(await stream.next())  # all first tokens come, though nothing was handed over
        assert prefill.engine.load().prompt_tokens == 300
        decode.allow(None)
        done = await asyncio.gather(*(collect(stream, answer) for stream, answer in zip(streams, answers, strict=True)))
        for answer, wanted in zip(done, solo(requests, shape), strict=True):
            assert answer.said == wanted.said
        assert prefill.engine.load().prompt_tokens > 300  # those that were set aside were computed twice
        assert decode.engine.load().prompt_tokens == 0


# A slow transport


class Slow:
    """A transport that reports the moves of its first transfer only when told to."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._finished: list[Completion] = []
        self.slow_moves: set[MoveId] = set()
        self.is_slow = True
        self.marks = True  # moves that begin now are slow
        self.name = engine.name
        self.mover: Mover = engine.mover
        self.register = engine.register
        self.local_info = engine.local_info
        self.add_peer = engine.add_peer
        self.remove_peer = engine.remove_peer
        self.cancel = engine.cancel
        self.close = engine.close

    def write(self, peer: str, ranges: Ranges) -> MoveId:
        return self._begun(self._engine.write(peer, ranges))  # type: ignore[arg-type]

    def read(self, peer: str, ranges: Ranges) -> MoveId:
        return self._begun(self._engine.read(peer, ranges))  # type: ignore[arg-type]

    def poll(self) -> list[Completion]:
        self._finished += self._engine.poll()
        told = [done for done in self._finished if not (self.is_slow and done.id in self.slow_moves)]
        self._finished = [done for done in self._finished if done not in told]
        return told

    def _begun(self, move: MoveId) -> MoveId:
        if self.marks:
            self.slow_moves.add(move)
        return move


def record_steps(worker: Worker) -> list[list[tuple[str, int, int]]]:
    """What the worker's runner computes from now on: (request, from, to) of every row of every step."""
    runner, steps = worker.engine._runner, []
    launch = runner.launch

    def recording(plan: StepPlan) -> None:
        if plan.rows:
            steps.append([(row.sequence.request_id, row.start, row.start + row.count) for row in plan.rows])
        launch(plan)

    runner.launch = recording  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize(("transfer", "mode"), [("shm", "write"), ("nixl", "write"), ("nixl", "read"), ("shm", "read")])
async def test_a_throttled_transfer_holds_up_nobody_else(transfer: str, mode: str) -> None:
    transports: list[Slow] = []

    def wrap(engine: TransferEngine) -> TransferEngine:
        transports.append(Slow(engine))
        return transports[-1]  # type: ignore[return-value]

    shape = Shape(transfer=transfer, mode=mode, token_budget=64, prefix_cache=False, wrap=wrap)  # type: ignore[arg-type]
    requests = [ask(list(range(1, 129))), ask(list(range(200, 328)))]
    expected = solo(requests, shape)
    async with relay(shape) as cluster:
        steps = record_steps(cluster.prefill[0])
        cluster.prefill[0].allow(0)
        first, second = (cluster.submit(request) for request in requests)
        await cluster.until(lambda: len(cluster.prefill[0].engine.requests) == 2)
        cluster.prefill[0].allow(2)  # the first prompt, in two chunks
        answer = Answer()
        answer.take(await first.next())
        await cluster.until(lambda: any(transport.slow_moves for transport in transports))
        for transport in transports:
            transport.marks = False
        cluster.prefill[0].allow(None)
        assert (await collect(second)).said == expected[1].said  # from prefill to the last token, past the first
        assert answer.tokens == {0: expected[0].tokens[0][:1]}
        ids = [[row[0] for row in step] for step in steps]
        assert [len(step) for step in ids] == [1, 1, 1, 1]
        assert ids[0] == ids[1] != ids[2] == ids[3]  # the second prompt began at the very next step
        assert cluster.decode[0].engine.load().transfers.in_flight == 1
        for transport in transports:
            transport.is_slow = False
        assert (await collect(first, answer)).said == expected[0].said


# Order, ends that the router finds, and failures


async def test_who_computes_here_and_who_is_handed_over_wait_in_one_line() -> None:
    """An older prompt that the decode worker must compute itself gets its place before younger transfers."""
    shape = Shape(max_batch=1, local_prefill_tokens=4, num_blocks=(64, 64))
    async with relay(shape) as cluster:
        decode = cluster.decode[0]
        running = cluster.submit(ask([1, 2, 3], max_tokens=40))
        assert await running.next()
        decode.allow(0)
        local = cluster.submit(ask([4, 5, 6], max_tokens=2))
        await cluster.until(lambda: len(decode.engine.requests) == 2)
        younger = [cluster.submit(ask([number] * 20, max_tokens=3)) for number in range(3)]
        await cluster.until(lambda: len(decode.engine.requests) == 5)
        steps = record_steps(decode)
        decode.allow(None)
        for stream in (running, local, *younger):
            while await stream.next():
                pass
        order = list(dict.fromkeys(row[0] for step in steps for row in step))
        assert order == [stream.request_id for stream in (running, local, *younger)]


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_a_stop_string_in_the_first_token_of_one_sample_leaves_the_others(mode: str) -> None:
    """The router finds it while the decode worker has nothing yet: no sample of the request exists there."""
    request = ask(list(range(1, 40)), n=3, temperature=1.0, seed=4)
    shape = Shape(mode=mode)  # type: ignore[arg-type]
    expected = solo([request], shape)[0].tokens
    async with relay(shape) as cluster:
        decode = cluster.decode[0]
        decode.allow(0)
        stream = cluster.submit(request)
        answer = Answer()
        while len(answer.tokens) < 3:
            answer.take(await stream.next())
        stream.finish(0, 1, FinishReason.STOP)
        stream.finish(2, 1, FinishReason.STOP)
        decode.allow(None)
        assert (await collect(stream, answer)).error is None
        assert answer.tokens == {0: expected[0][:1], 1: expected[1], 2: expected[2][:1]}
        await cluster.idle()


async def test_stop_strings_in_the_first_tokens_of_all_samples_end_the_request() -> None:
    async with relay(Shape()) as cluster:
        cluster.decode[0].allow(0)
        stream = cluster.submit(ask(list(range(1, 40)), n=2, temperature=1.0, seed=4))
        assert await stream.next()
        for sample in (0, 1):
            stream.finish(sample, 1, FinishReason.STOP)
        cluster.decode[0].allow(None)
        await cluster.idle()
        assert cluster.decode[0].engine.load().output_tokens == 0


class Broken(Slow):
    """A transport whose moves fail."""

    def poll(self) -> list[Completion]:
        return [Completion(done.id, "the cable was cut") for done in self._engine.poll()]


@pytest.mark.parametrize(("transfer", "mode"), [("shm", "write"), ("memory", "write"), ("memory", "read"), ("nixl", "write")])
async def test_a_hand_over_that_fails_is_not_the_clients_problem(transfer: str, mode: str) -> None:
    """The decode worker computes the prompts itself, whichever side noticed the failure."""
    shape = Shape(transfer=transfer, mode=mode, token_budget=16, wrap=Broken)  # type: ignore[arg-type]
    requests = [ask(prompt) for prompt in random_prompts(20, seed=9)]
    async with relay(shape) as cluster:
        for answer, wanted in zip(await cluster.answers(requests), solo(requests, shape), strict=True):
            assert answer.said == wanted.said
        assert cluster.decode[0].engine.load().prompt_tokens > 0


async def test_what_a_client_does_wrong_is_told_at_once_and_ends_both_halves() -> None:
    async with relay(Shape()) as cluster:
        wrong = [ask([1] * 300), ask([1, 2, 99_999])]
        for answer in await cluster.answers(wrong):
            assert isinstance(answer.error, InvalidRequestError)
            assert answer.error.param == "prompt"
