"""Which worker gets a request."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.policy import LOAD_WEIGHTS, CompletionRate, Policy, overloaded, tokens_of
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role


@dataclass
class Stub:
    load_tokens: int = 0
    id: WorkerId = field(default_factory=lambda: new_worker_id("decode"))


def choose(policy: Policy, workers: list[Stub], cached: dict[WorkerId, int]) -> Stub:
    return policy.choose(workers, cached, {worker.id: worker for worker in workers})


def test_round_robin_takes_the_first_whatever_the_load() -> None:
    workers = [Stub(1000), Stub(0), Stub(5)]
    assert choose(Policy("round_robin"), workers, {workers[1].id: 10_000}) is workers[0]


def test_least_loaded_takes_the_fewest_tokens_and_of_equal_ones_the_first() -> None:
    workers = [Stub(1000), Stub(10), Stub(500), Stub(10)]
    assert choose(Policy("least_loaded"), workers, {}) is workers[1]


def test_what_is_cached_counts_elsewhere_too() -> None:
    """A worker that is no candidate, but can be used, holds the prompt."""
    near, far = Stub(), Stub(100)
    policy = Policy("prefix_aware")
    assert policy.choose([near], {far.id: 512}, {far.id: far}) is far
    assert policy.choose([near], {far.id: 512}, {}) is near


# Load and cached tokens of each of two workers; which of them a prefill and a decode worker's policy takes.
@pytest.mark.parametrize(
    ("first", "second", "prefill", "decode"),
    [
        ((0, 0), (0, 512), 1, 1),  # the cache decides between idle ones
        ((0, 0), (500, 512), 1, 1),  # waiting for 500 tokens is less than computing 512
        ((0, 0), (600, 512), 0, 1),  # a prefill worker's queue has to be computed first; a decode worker's runs beside
        ((0, 0), (2100, 512), 0, 0),  # too busy, though it has everything
        ((1000, 0), (3000, 512), 0, 1),  # only the difference of loads counts
        ((300, 496), (320, 512), 0, 1),
        ((700, 0), (600, 16), 1, 1),
        ((100, 0), (0, 0), 1, 1),  # nobody has anything: least loaded
    ],
)
def test_cached_tokens_count_against_load(first: tuple[int, int], second: tuple[int, int], prefill: int, decode: int) -> None:
    workers = [Stub(first[0]), Stub(second[0])]
    cached = {worker.id: tokens for worker, (_, tokens) in zip(workers, (first, second), strict=True) if tokens}
    for role, expected in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        policy = Policy("prefix_aware", LOAD_WEIGHTS[role])
        for _ in range(3):  # whoever's turn it is
            assert choose(policy, workers, cached) is workers[expected], role


def test_a_popular_prefix_spreads_instead_of_drowning_its_worker() -> None:
    """Each request stays; the prefix is cached where it was computed once."""
    workers = [Stub() for _ in range(4)]
    policy = Policy("prefix_aware", LOAD_WEIGHTS[Role.PREFILL])
    cached = {workers[0].id: 1024}
    for _ in range(200):
        chosen = choose(policy, workers, cached)
        chosen.load_tokens += 1100
        cached[chosen.id] = 1024
    loads = sorted(worker.load_tokens for worker in workers)
    assert loads[-1] - loads[0] <= 2 * 1100


def test_a_session_leaves_a_worker_that_is_far_above_the_others() -> None:
    idle, busy = Stub(100), Stub(8000)
    assert not overloaded(busy, [idle, busy])
    busy.load_tokens = 9000
    assert overloaded(busy, [idle, busy])
    idle.load_tokens = 1000
    assert not overloaded(busy, [idle, busy])


def test_a_request_costs_its_prompt_and_a_bounded_output_per_sample() -> None:
    request = GenerateRequest(external_id="x", prompt=[1] * 10, params=SamplingParams(n=2, max_tokens=5))
    assert tokens_of(request) == 20
    endless = GenerateRequest(external_id="x", prompt=[1] * 10, params=SamplingParams(max_tokens=100_000))
    assert tokens_of(endless) < 1000


def test_retry_after_follows_the_rate_at_which_requests_end() -> None:
    rate = CompletionRate()
    assert rate.retry_after_s(100, now=0.0) == 1
    for tenth in range(1000):
        rate.completed(now=tenth / 10)  # ten a second
    assert 4 <= rate.retry_after_s(100, now=100.0) <= 6
    assert rate.retry_after_s(100_000, now=100.0) == 60
