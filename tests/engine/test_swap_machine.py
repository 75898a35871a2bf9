"""Scheduler, pools, swap and both caches, driven by Hypothesis through every transition. After each step the invariants hold,
and the events since the first one rebuild exactly what can be found (`SwapEngine.step` checks both)."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvrelay.states import FinishReason
from kvrelay.wire.events import Freed, FreedForNow
from kvrelay.wire.serving import Finish, Submit
from tests.engine.swap_engine import SwapEngine
from tests.engine.test_engine import solo


class SwapMachine(RuleBasedStateMachine):
    """Prompts are alike, so that prefixes are shared, evicted and found again on the host."""

    @initialize(
        num_blocks=st.integers(7, 14),
        host_blocks=st.sampled_from([0, 3, 8, 40]),
        delays=st.lists(st.sampled_from([1, 1, 1, 2, 5, 9, 25]), min_size=1, max_size=6),
        prefix_cache=st.sampled_from([True, True, False]),
        preempt=st.sampled_from(["latest", "oldest"]),
        token_budget=st.sampled_from([3, 9, 32]),
    )
    def start(
        self, num_blocks: int, host_blocks: int, delays: list[int], prefix_cache: bool, preempt: str, token_budget: int
    ) -> None:
        self.engine = SwapEngine(
            num_blocks=num_blocks,
            host_blocks=host_blocks,
            delays=delays,
            prefix_cache=prefix_cache,
            preempt=preempt,
            token_budget=token_budget,
            max_batch=6,
        )

    @rule(
        stem=st.integers(0, 12),
        rest=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def submit(self, stem: int, rest: list[int], max_tokens: int, n: int, priority: int, salt: str) -> None:
        prompt = [*range(stem), *rest]
        temperature, seed = float(n > 1), len(self.engine.requests)
        room = self.engine.engine.kv.pool.num_blocks * 4 - len(prompt)
        self.engine.submit(
            prompt,
            n=n,
            max_tokens=min(max_tokens, room),
            temperature=temperature,
            seed=seed,
            priority=priority,
            cache_salt=salt,
        )

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.engine.has_work:
                self.engine.step()

    @precondition(lambda self: self.engine.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.engine.abort([data.draw(st.sampled_from(list(self.engine.engine.requests)))])

    @precondition(lambda self: self.engine.engine.requests)
    @rule(data=st.data(), sample=st.integers(0, 2))
    def finish(self, data: st.DataObject, sample: int) -> None:
        request_id = data.draw(st.sampled_from(list(self.engine.engine.requests)))
        if sample < self.engine.engine.requests[request_id].params.n:
            self.engine.engine.finish(Finish(request_id=request_id, sample=sample, keep_tokens=0, reason=FinishReason.STOP))

    @rule()
    def late_copies_end(self) -> None:
        self.engine.runner.end_copies()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        for request in self.engine.requests:
            self.check_request(request)

    def check_request(self, request: Submit) -> None:
        params = request.params
        expected = solo(
            request.prompt, n=params.n, max_tokens=params.max_tokens, temperature=params.temperature, seed=params.seed
        )
        for sample, tokens in expected.items():
            got = self.engine.seen.tokens.get((request.request_id, sample), [])
            assert got == tokens[: len(got)]
            if self.engine.seen.ends.get((request.request_id, sample)) is FinishReason.LENGTH:
                assert got == tokens
        assert self.engine.kinds(request).count("Freed") == 1
        assert self.engine.kinds(request)[-1] == "Freed"


class TestSwapMachine(SwapMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@pytest.mark.long
class TestSwapMachineForLong(SwapMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_the_same_traffic_goes_through_every_transition() -> None:
    """So that the machine's rules are known to reach all of them."""
    seen: set[str] = set()
    rng = random.Random(11)
    for _ in range(30):
        engine = SwapEngine(
            num_blocks=rng.randrange(7, 14),
            host_blocks=rng.choice([0, 3, 8, 40]),
            delays=[rng.choice([1, 1, 2, 5, 9, 25]) for _ in range(5)],
            preempt=rng.choice(["latest", "oldest"]),
            token_budget=rng.choice([3, 9, 32]),
            max_batch=6,
        )
        for number in range(12):
            prompt = [*range(rng.randrange(12)), *(rng.randrange(4) for _ in range(rng.randrange(1, 7)))]
            request = engine.submit(prompt, n=rng.choice([1, 1, 2]), max_tokens=rng.randrange(1, 12), seed=number)
            for _ in range(rng.randrange(12)):
                engine.step()
            if number % 5 == 4:
                engine.engine.abort([request.request_id])
        engine.run()
        seen.update(type(event).__name__ for event in engine.events)
        seen.update(str(event.reason) for event in engine.events if isinstance(event, Freed | FreedForNow))
        seen.update({"host hit"} if engine.engine.load().host.hit_tokens else ())
    expected = {"Stored", "Removed", "Swapped", "Restored", "FreedForNow", "Freed", "host hit", "finished", "aborted"}
    expected |= {"rolled_back", "preempted", "no_swap_room", "swap_out_timeout", "swap_in_timeout"}
    assert expected <= seen, f"never seen: {expected - seen}"
