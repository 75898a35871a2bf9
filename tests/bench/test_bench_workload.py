"""What benchmarks ask, and the traffic beside it."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvrelay.bench.harness.cluster import Answer, finish
from kvrelay.bench.harness.workload import draw, greedy, traffic
from kvrelay.errors import BenchError


def test_a_seed_gives_the_same_tokens_again_and_a_generator_others() -> None:
    assert draw("a", 20) == draw("a", 20) != draw("b", 20)
    source = random.Random(1)
    assert draw(source, 20) != draw(source, 20)
    assert set(draw(1, 50, range(3))) == {0, 1, 2}


def test_a_request_has_exactly_the_tokens_it_is_asked_for() -> None:
    params = greedy(7)
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (7, 0.0, True)


async def test_traffic_ends_when_an_answer_comes_at_that_moment() -> None:
    answer = Answer(1, submitted_at=0.0)
    answer.task = asyncio.create_task(asyncio.sleep(0))
    answer.task.add_done_callback(lambda _: waiting.cancel())
    waiting = asyncio.create_task(finish(answer))
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_traffic_runs_as_long_as_it_is_open_and_no_number_comes_twice() -> None:
    asked: list[int] = []

    async def ask(number: int) -> None:
        asked.append(number)
        await asyncio.sleep(0)

    async with traffic(ask, 2) as answered:
        while len(answered) < 10:
            await asyncio.sleep(0)
    count = len(asked)
    await asyncio.sleep(0)
    assert len(asked) == count == len(set(asked))
    assert set(answered) <= set(asked)


async def test_traffic_that_failed_is_an_error() -> None:
    async def ask(number: int) -> None:
        raise BenchError("no answer")

    with pytest.raises(BenchError, match="no answer"):
        async with traffic(ask, 2):
            await asyncio.sleep(0.01)
