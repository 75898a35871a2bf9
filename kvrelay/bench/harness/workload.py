"""Prompts of random tokens, requests that generate a fixed number of them, and traffic beside what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable

from kvrelay.ids import new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Submit

COMMON_TOKENS = range(1000, 30000)  # ordinary ones of any large vocabulary


def draw(source: random.Random | int | str, count: int, vocabulary: range = COMMON_TOKENS) -> list[int]:
    """A source that is no generator is the seed of one: the same seed gives the same tokens."""
    generator = source if isinstance(source, random.Random) else random.Random(source)
    return generator.choices(vocabulary, k=count)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def submission(prompt: list[int], max_tokens: int, priority: int = 0) -> Submit:
    request_id = new_request_id()
    return Submit(request_id=request_id, external_id=request_id, prompt=prompt, params=greedy(max_tokens), priority=priority)


@contextlib.asynccontextmanager
async def traffic(ask: Callable[[int], Awaitable[object]], lanes: int) -> AsyncIterator[list[int]]:
    """`lanes` requests at a time come and go as long as it is open; the list has the numbers of those that were answered.
    Raises what a request raised."""
    answered: list[int] = []

    async def come_and_go(lane: int) -> None:
        for number in itertools.count(1000 * (lane + 1)):
            await ask(number)
            answered.append(number)

    tasks = [asyncio.create_task(come_and_go(lane)) for lane in range(lanes)]
    try:
        yield answered
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
