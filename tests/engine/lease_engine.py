"""A `SwapEngine` whose requests keep their KV and go on from that of others. It notes what was computed of each prompt, and who
asked the prefix cache."""

from __future__ import annotations

from collections import Counter

from kvrelay.engine.interfaces import StepPlan
from kvrelay.engine.request import Sequence
from kvrelay.ids import LeaseId, RequestId, new_lease_id, new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.states import LeaseState
from kvrelay.wire.events import Removed
from kvrelay.wire.serving import Inherited, Keep, LeaseNews, StepOutputs, Submit
from tests.engine.swap_engine import SwapEngine
from tests.engine.test_engine import Collected, make_engine, run, submit

TTL_S = 1000.0


class Seen(Collected):
    """Each piece of news comes once."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[tuple[RequestId, int], LeaseNews] = {}
        self.inherited: dict[RequestId, Inherited] = {}

    def take(self, step: StepOutputs) -> None:
        for inherited in step.inherited:
            assert inherited.request_id not in self.inherited, "said twice what was inherited"
            assert inherited.request_id not in self.first, "the first token came before what was inherited"
            self.inherited[inherited.request_id] = inherited
        super().take(step)
        for news in step.leases:
            assert (news.request_id, news.sample) not in self.leases, "said twice whether it is kept"
            assert news.kept != bool(news.reason)
            self.leases[news.request_id, news.sample] = news


class LeaseEngine(SwapEngine):
    """By default a pool of which leases may pin all but what the longest request needs."""

    def __init__(self, *, num_blocks: int = 24, max_model_len: int = 40, **options: object) -> None:
        super().__init__(num_blocks=num_blocks, max_model_len=max_model_len, **{"lease_share": 1.0, **options})  # type: ignore[arg-type]
        self.seen: Seen = Seen()
        self.computed: Counter[RequestId] = Counter()  # tokens, until the first one was sampled
        self.walked: set[RequestId] = set()
        self._sampled: set[RequestId] = set()
        self._launch, self._attach = self.runner.launch, self.engine.kv.attach
        self.runner.launch = self._count_computed  # type: ignore[method-assign]
        self.engine.kv.attach = self._note_walk  # type: ignore[method-assign]

    def _count_computed(self, plan: StepPlan) -> None:
        for row in plan.rows:
            request_id = row.sequence.request_id
            self.computed[request_id] += row.count if request_id not in self._sampled else 0
            self._sampled.update({request_id} if row.samples else ())
        self._launch(plan)

    def _note_walk(self, sequence: Sequence, *, headroom: int) -> bool:
        self.walked.add(sequence.request_id)
        return self._attach(sequence, headroom=headroom)

    def ask(
        self,
        prompt: list[int],
        *,
        keep: bool = True,
        ttl_s: float = TTL_S,
        inherit: LeaseId | None = None,
        priority: int = 0,
        cache_salt: str = "",
        owner: str = "",
        **params: object,
    ) -> Submit:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})  # type: ignore[arg-type]
        request = Submit(
            request_id=new_request_id(),
            external_id=f"client-{len(self.requests)}",
            prompt=prompt,
            params=sampling,
            priority=priority,
            cache_salt=cache_salt,
            keep=Keep([new_lease_id() for _ in range(sampling.n)], ttl_s, owner) if keep else None,
            inherit=inherit,
        )
        self.requests.append(request)
        self.engine.submit(request)
        return request

    def parent(self, prompt: list[int], **params: object) -> Submit:
        """One that has ended."""
        request = self.ask(prompt, **params)  # type: ignore[arg-type]
        self.until_ended(request)
        return request

    def child(self, parent: Submit, suffix: list[int], *, sample: int = 0, keep: bool = False, **params: object) -> Submit:
        return self.ask(
            self.text(parent, sample) + suffix, inherit=lease_id(parent, sample), keep=keep, **params  # type: ignore[arg-type]
        )  # fmt: skip

    def text(self, request: Submit, sample: int = 0) -> list[int]:
        """Prompt and output, as far as the client saw it."""
        return request.prompt + self.seen.tokens.get((request.request_id, sample), [])

    def until_ended(self, *requests: Submit) -> None:
        for _ in range(500):
            if not any(request.request_id in self.engine.requests for request in requests) and not self.engine._outputs:
                break
            self.step()
        else:
            raise AssertionError("it did not end")
        if self.engine.leases.has_news:
            self.step()

    def is_kept(self, request: Submit, sample: int = 0) -> bool:
        return self.seen.leases[request.request_id, sample].kept

    def state(self, request: Submit, sample: int = 0) -> LeaseState:
        lease = self.engine.leases.leases.get(lease_id(request, sample))
        return LeaseState.ENDED if lease is None else lease.state

    @property
    def pinned(self) -> int:
        return self.engine.load().blocks.pinned

    def end(self) -> None:
        """Everything ends, then every lease; nothing is left, on either side."""
        for _ in range(4000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine did not come to an end"
        self.now += 10 * TTL_S
        assert self.engine.load().leases == 0
        self.settle()
        assert self.pinned == 0

    def assert_as_from_scratch(self, *requests: Submit) -> None:
        for request in requests:
            for sample, tokens in from_scratch(request).items():
                assert self.seen.tokens[request.request_id, sample] == tokens

    def assert_inherited(self, child: Submit, parent: Submit, sample: int = 0) -> None:
        """All of the parent but its last token."""
        num_tokens = len(self.text(parent, sample)) - 1
        assert self.seen.inherited[child.request_id] == Inherited(child.request_id, num_tokens)
        assert self.computed[child.request_id] == len(child.prompt) - num_tokens
        assert child.request_id not in self.walked
        assert self.seen.first[child.request_id].cached_tokens == num_tokens

    def removed(self) -> set[bytes]:
        return {digest for event in self.events if isinstance(event, Removed) for digest in event.hashes}


def lease_id(request: Submit, sample: int = 0) -> LeaseId:
    assert request.keep is not None
    return request.keep.lease_ids[sample]


def from_scratch(request: Submit) -> dict[int, list[int]]:
    """The tokens of each sample, by an engine that nobody else uses."""
    params = request.params
    engine = make_engine(num_blocks=600, max_model_len=1200, prefix_cache=False, token_budget=1200)
    engine.submit(submit(request.prompt, n=params.n, max_tokens=params.max_tokens, temperature=params.temperature, seed=params.seed))
    return {sample: tokens for (_, sample), tokens in run(engine).tokens.items()}
