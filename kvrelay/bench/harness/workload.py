"""Prompts of random tokens and requests that generate a fixed number of them."""

from __future__ import annotations

import random

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
