"""Leases among everything else, driven by Hypothesis. After each step the invariants hold, and no kept is gone before its
time; at the end each request has its tokens, each sample one word on its kept, and nothing is held."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvrelay.ids import KeptId, RequestId
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Finish, Submit
from tests.engine.kept_engine import KeptEngine, from_scratch

TTLS_S = (5.0, 60.0, 500.0)


class KeptTraffic:
    """What the rules do. Knows what was promised to be kept until when."""

    def __init__(self, **options: object) -> None:
        self.engine = KeptEngine(max_batch=6, **options)  # type: ignore[arg-type]
        self.promised: dict[KeptId, float] = {}
        self.cut: dict[tuple[str, int], int] = {}

    def submit(self, prompt: list[int], *, keep: bool, ttl_s: float, max_tokens: int, n: int, **more: object) -> Submit:
        seed = len(self.engine.requests)
        room = 40 - len(prompt)
        return self.engine.ask(
            prompt, keep=keep, ttl_s=ttl_s, max_tokens=min(max_tokens, room), n=n, temperature=float(n > 1), seed=seed, **more  # type: ignore[arg-type]
        )  # fmt: skip

    def step(self) -> None:
        num_known = len(self.engine.seen.kept)
        self.engine.step()
        for news in list(self.engine.seen.kept.values())[num_known:]:
            if news.kept:
                self.promised[news.kept_id] = self.engine.now + news.ttl_s
        self.check()

    def check(self) -> None:
        self.engine.engine.load()
        for kept_id, until in self.promised.items():
            if self.engine.now < until:
                kept = self.engine.engine.core.kept.samples[kept_id]
                assert not kept.is_over
                assert kept.kv.tokens == self.text(kept.kv.request_id, kept.kv.sample)

    def text(self, request_id: str, sample: int) -> list[int]:
        (request,) = [one for one in self.engine.requests if one.request_id == request_id]
        output = self.engine.seen.tokens.get((request.request_id, sample), [])
        return request.prompt + output[: self.cut.get((request_id, sample), len(output))]

    def child(self, kept_id: KeptId, suffix: list[int], **more: object) -> None:
        (request, sample) = next(
            (one, one.keep.kept_ids.index(kept_id))
            for one in self.engine.requests
            if one.keep is not None and kept_id in one.keep.kept_ids
        )
        prompt = self.text(request.request_id, sample) + suffix
        if len(prompt) < 39:
            self.submit(prompt, inherit=kept_id, cache_salt=request.cache_salt, **more)  # type: ignore[arg-type]

    def finish(self, request: Submit, sample: int, num_unseen: int) -> None:
        key = (request.request_id, sample)
        if sample < request.params.n and key not in self.cut:
            seen = len(self.engine.seen.tokens.get((request.request_id, sample), []))
            self.cut[key] = keep_tokens = max(0, seen - num_unseen)
            message = Finish(
                request_id=request.request_id, sample=sample, keep_tokens=keep_tokens, reason=FinishReason.STOP
            )  # fmt: skip
            self.engine.engine.finish(message)
            self.step()

    def abort(self, request_id: RequestId) -> None:
        self.engine.engine.abort([request_id])
        self.step()

    def release(self, kept_id: KeptId) -> None:
        self.engine.engine.release_kept([kept_id])
        self.promised.pop(kept_id, None)

    def end(self) -> None:
        while self.engine.engine.has_work:
            self.step()
        self.engine.end()
        for request in self.engine.requests:
            self.check_request(request)

    def check_request(self, request: Submit) -> None:
        assert request.request_id not in self.engine.seen.failures
        for sample, tokens in from_scratch(request).items():
            got = self.engine.seen.tokens.get((request.request_id, sample), [])
            assert got == tokens[: len(got)]
            if self.engine.seen.ends.get((request.request_id, sample)) is FinishReason.LENGTH:
                assert got == tokens
            assert request.keep is None or (request.request_id, sample) in self.engine.seen.kept
        if request.inherit is not None and self.engine.seen.tokens.get((request.request_id, 0)):
            assert request.request_id in self.engine.seen.inherited


class LeaseMachine(RuleBasedStateMachine):
    """Prompts are alike, so that blocks are shared by the cache, by forks and by kept KV."""

    @initialize(
        num_blocks=st.integers(14, 26),
        host_blocks=st.sampled_from([0, 4, 12, 60]),
        delays=st.lists(st.sampled_from([1, 1, 1, 2, 5, 9, 25]), min_size=1, max_size=6),
        prefix_cache=st.sampled_from([True, True, False]),
        kept_kv_share=st.sampled_from([0.3, 1.0]),
        token_budget=st.sampled_from([3, 9, 32]),
    )
    def start(self, **options: object) -> None:
        self.traffic = KeptTraffic(**options)

    @rule(
        stem=st.integers(0, 12),
        rest=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        keep=st.sampled_from([True, True, False]),
        ttl_s=st.sampled_from(TTLS_S),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        cache_salt=st.sampled_from(["", "", "tenant"]),
    )
    def submit(self, stem: int, rest: list[int], **more: object) -> None:
        self.traffic.submit([*range(stem), *rest], **more)  # type: ignore[arg-type]

    @precondition(lambda self: self.traffic.promised)
    @rule(
        data=st.data(),
        suffix=st.lists(st.integers(0, 3), max_size=5),
        keep=st.booleans(),
        ttl_s=st.sampled_from(TTLS_S),
        max_tokens=st.integers(1, 9),
        n=st.sampled_from([1, 1, 2]),
        priority=st.integers(-1, 0),
    )
    def child(self, data: st.DataObject, suffix: list[int], **more: object) -> None:
        self.traffic.child(data.draw(st.sampled_from(list(self.traffic.promised))), suffix, **more)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.traffic.engine.engine.has_work:
                self.traffic.step()

    @precondition(lambda self: self.traffic.engine.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.traffic.abort(data.draw(st.sampled_from(list(self.traffic.engine.engine.requests))))

    @precondition(lambda self: self.traffic.engine.requests)
    @rule(data=st.data(), sample=st.integers(0, 2), num_unseen=st.integers(0, 3))
    def finish(self, data: st.DataObject, sample: int, num_unseen: int) -> None:
        self.traffic.finish(data.draw(st.sampled_from(self.traffic.engine.requests[-4:])), sample, num_unseen)

    @precondition(lambda self: self.traffic.promised)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.traffic.release(data.draw(st.sampled_from(list(self.traffic.promised))))

    @rule(seconds=st.sampled_from([2.0, 30.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.traffic.engine.now += seconds
        self.traffic.check()

    @rule()
    def late_copies_end(self) -> None:
        self.traffic.engine.runner.end_copies()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.end()


class TestLeaseMachine(LeaseMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


def test_the_same_traffic_goes_through_every_transition() -> None:
    """So that the machine's rules are known to reach all of them."""
    seen: set[str] = set()
    for seed in range(5):
        rng = random.Random(seed)
        traffic = KeptTraffic(
            num_blocks=rng.randrange(14, 26),
            host_blocks=rng.choice([0, 4, 12, 60]),
            delays=[rng.choice([1, 1, 2, 5, 9, 25]) for _ in range(5)],
            token_budget=rng.choice([3, 9, 32]),
        )
        kept = traffic.engine.engine.core.kept
        for number in range(25):
            more = {
                "keep": number % 4 > 0,
                "ttl_s": rng.choice(TTLS_S),
                "max_tokens": rng.randrange(1, 12),
                "n": 1 + number % 2,
            }
            if traffic.promised and number % 2:
                traffic.child(rng.choice(list(traffic.promised)), [1, 2], **more)
            else:
                traffic.submit([*range(rng.randrange(12)), number], **more)  # type: ignore[arg-type]
            for _ in range(rng.randrange(9)):
                traffic.step()
                seen.update(str(kept.state) for kept in kept.samples.values())
                seen.update("stuck" for kept in kept.samples.values() if kept.is_stuck)
                seen.update("held and over" for kept in kept.samples.values() if kept.is_over)
                seen.update("loading" for heir in kept.heirs.values() if heir.absent)
            if number % 7 == 6:
                traffic.abort(traffic.engine.requests[-1].request_id)
            traffic.engine.now += rng.choice([0.0, 0.0, 3.0])
        traffic.end()
        for news in traffic.engine.seen.kept.values():
            seen.add(
                "kept" if news.kept else next(why for why in ("quota", "way to the host", "nothing") if why in news.reason)
            )
        seen.update("inherited" if told.num_tokens else "computed" for told in traffic.engine.seen.inherited.values())
    expected = {"on_device", "leaving", "on_host", "stuck", "loading", "kept", "quota", "nothing", "inherited", "computed"}
    assert expected <= seen, f"never seen: {expected - seen}"
