"""A `SwapEngine` whose requests keep their KV and go on from that of others. It notes what was computed of each prompt, and who
asked the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvrelay.engine.interfaces import StepPlan
from kvrelay.engine.request import Sequence
from kvrelay.ids import KeptId, RequestId, new_kept_id, new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.states import KeptState
from kvrelay.wire.events import Removed
from kvrelay.wire.serving import Inherited, Keep, KeptNews, StepOutputs, Submit, of_kind
from tests.engine.swap_engine import SwapEngine
from tests.engine.test_engine import Collected, make_engine, run, submit

TTL_S = 1000.0


class Seen(Collected):
    """Each piece of news comes once."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[RequestId, int], KeptNews] = {}
        self.inherited: dict[RequestId, Inherited] = {}

    def take(self, step: StepOutputs) -> None:
        for inherited in of_kind(Inherited, step.news):
            assert inherited.request_id not in self.inherited, "said twice what was inherited"
            assert inherited.request_id not in self.first, "the first token came before what was inherited"
            self.inherited[inherited.request_id] = inherited
        super().take(step)
        for news in of_kind(KeptNews, step.news):
            assert (news.request_id, news.sample) not in self.kept, "said twice whether it is kept"
            assert news.kept != bool(news.reason)
            self.kept[news.request_id, news.sample] = news


class KeptEngine(SwapEngine):
    """By default a pool of which kept KV may pin all but what the longest request needs."""

    def __init__(self, *, num_blocks: int = 24, max_model_len: int = 40, **options: object) -> None:
        super().__init__(num_blocks=num_blocks, max_model_len=max_model_len, **{"kept_kv_share": 1.0, **options})  # type: ignore[arg-type]
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
        if sequence.request_id not in self._sampled:
            self.walked.add(sequence.request_id)
        return self._attach(sequence, headroom=headroom)

    def ask(
        self,
        prompt: list[int],
        *,
        keep: bool = True,
        ttl_s: float = TTL_S,
        inherit: KeptId | None = None,
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
            keep=Keep([new_kept_id() for _ in range(sampling.n)], ttl_s, owner) if keep else None,
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
            self.text(parent, sample) + suffix, inherit=kept_id(parent, sample), keep=keep, **params  # type: ignore[arg-type]
        )  # fmt: skip

    def text(self, request: Submit, sample: int = 0) -> list[int]:
        """Prompt and output, as far as the client saw it."""
        return request.prompt + self.seen.tokens.get((request.request_id, sample), [])

    def run_until(self, reached: Callable[[], bool]) -> None:
        for _ in range(2000):
            if reached():
                return
            self.step()
        raise AssertionError("it was never reached")

    def until_ended(self, *requests: Submit) -> None:
        self.run_until(lambda: not any(request.request_id in self.engine.requests for request in requests))

    def is_kept(self, request: Submit, sample: int = 0) -> bool:
        return self.seen.kept[request.request_id, sample].kept

    def state(self, request: Submit, sample: int = 0) -> KeptState:
        kept = self.engine.core.kept.samples.get(kept_id(request, sample))
        return KeptState.ENDED if kept is None else kept.state

    @property
    def pinned(self) -> int:
        return self.engine.load().blocks.pinned

    def end(self) -> None:
        """Everything ends, then all kept KV; nothing is left, on either side."""
        self.run_until(lambda: not self.engine.has_work)
        self.now += 10 * TTL_S
        assert self.engine.load().kept == 0
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


def kept_id(request: Submit, sample: int = 0) -> KeptId:
    assert request.keep is not None
    return request.keep.kept_ids[sample]


def from_scratch(request: Submit) -> dict[int, list[int]]:
    """The tokens of each sample, by an engine that nobody else uses."""
    params = request.params
    engine = make_engine(num_blocks=100, max_model_len=400, prefix_cache=False, token_budget=400, check_invariants=False)
    engine.submit(
        submit(request.prompt, n=params.n, max_tokens=params.max_tokens, temperature=params.temperature, seed=params.seed)
    )
    return {sample: tokens for (_, sample), tokens in run(engine).tokens.items()}
