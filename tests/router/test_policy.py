"""Which worker gets a request."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.router.backend import GenerateRequest
from kvrelay.router.policy import CompletionRate, Policy, tokens_of
from kvrelay.sampling import SamplingParams


@dataclass
class Stub:
    num_tokens_in_flight: int = 0
    num_foreign_requests: int = 0


def test_round_robin_takes_turns_whatever_the_load() -> None:
    workers = [Stub(1000), Stub(0), Stub(5)]
    policy = Policy("round_robin")
    chosen = [policy.choose(workers) for _ in range(6)]
    assert all(chosen.count(worker) == 2 for worker in workers)


def test_least_loaded_takes_the_fewest_tokens() -> None:
    workers = [Stub(1000), Stub(10), Stub(500)]
    policy = Policy("least_loaded")
    assert all(policy.choose(workers) is workers[1] for _ in range(5))


def test_equally_loaded_workers_take_turns() -> None:
    workers = [Stub(), Stub(), Stub()]
    policy = Policy("least_loaded")
    assert {id(policy.choose(workers)) for _ in range(3)} == {id(worker) for worker in workers}


def test_work_of_other_routers_counts() -> None:
    workers = [Stub(100, num_foreign_requests=5), Stub(700)]
    assert Policy("least_loaded").choose(workers) is workers[1]


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
