"""An engine over the fake runner with blocks on the host, a clock that counts steps, and copies that may take long."""

from __future__ import annotations

import random

from leaks import check_idle

from kvrelay.config import EngineOptions
from kvrelay.engine.engine import Engine
from kvrelay.engine.request import Sequence
from kvrelay.ids import RequestId
from kvrelay.runner.fake import FakeRunner
from kvrelay.states import RequestState
from kvrelay.wire.events import CacheEvent, Cleared, Freed, Removed, Stored
from kvrelay.wire.serving import Submit
from tests.engine.test_engine import VOCAB, WORKER, Collected, submit

TIMEOUT_STEPS = 6
NEVER = 10**9
EOS = 0


class SwapEngine:
    """`delays` says how many steps each copy takes; more than TIMEOUT_STEPS is too long."""

    def __init__(
        self,
        *,
        num_blocks: int = 12,
        host_blocks: int = 64,
        delays: list[int] | None = None,
        eos_one_in: int = 0,
        max_model_len: int = 0,
        **options: object,
    ) -> None:
        self.now = 0.0
        self.delays = delays or [1]
        self._num_copies = 0
        settings = {"block_size": 4, "max_batch": 16, "token_budget": 32, "check_invariants": True, **options}
        settings = {"swap_timeout_s": float(TIMEOUT_STEPS), "swap_blocks": host_blocks, **settings}
        self.options = EngineOptions(**settings)  # type: ignore[arg-type]
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            vocab_size=VOCAB,
            block_size=self.options.block_size,
            eos_token_ids=(EOS,) if eos_one_in else (),
            eos_one_in=eos_one_in,
            num_host_blocks=host_blocks,
            copy_delay=self._delay,
        )
        self.engine = Engine(
            options=self.options,
            runner=self.runner,
            worker_id=WORKER,
            eos_token_ids=self.runner.eos_token_ids,
            max_model_len=max_model_len or num_blocks * self.options.block_size,
            vocab_size=VOCAB,
            cache_seed="fake",
            clock=lambda: self.now,
        )
        self.recorder = self.engine.kv.record_events()
        self.events: list[CacheEvent] = []
        self.seen = Collected()
        self.requests: list[Submit] = []
        self.longest_wait: dict[RequestId, int] = {}
        self._waits: dict[RequestId, int] = {}

    def _delay(self) -> int:
        self._num_copies += 1
        return self.delays[self._num_copies % len(self.delays)]

    def submit(self, prompt: list[int], **params: object) -> Submit:
        request = submit(prompt, **params)
        request = Submit(
            request_id=request.request_id, external_id=f"client-{len(self.requests)}", prompt=prompt, params=request.params,
            priority=request.priority, cache_salt=request.cache_salt,
        )  # fmt: skip
        self.requests.append(request)
        self.engine.submit(request)
        return request

    def sequence(self, request: Submit, sample: int = 0) -> Sequence:
        (found,) = [s for s in self.engine.requests[request.request_id].sequences if s.sample == sample]
        return found

    def step(self) -> None:
        self.now += 1.0
        self.seen.take(self.engine.step())
        self.events += self.recorder.take()
        self._note_waits()
        assert findable(self.events) == cached(self.engine)

    def until_swapped(self, request: Submit, *, saved: bool = True) -> Sequence:
        for _ in range(200):
            sequence = self.sequence(request)
            swap = self.engine.core.swap
            if sequence.state is RequestState.SWAPPED and (not saved or swap.is_saved(sequence)):
                return sequence
            self.step()
        raise AssertionError("it was never swapped out")

    def run(self, *, max_steps: int = 4000) -> Collected:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine did not come to an end"
        self.settle()
        return self.seen

    def settle(self) -> None:
        """Copies that nobody waits for end too, and then nothing is held."""
        for _ in range(3):
            self.runner.end_copies()
            self.engine.scheduler.take_copied(0.0)
        self.events += self.recorder.take()
        assert not self.engine.core.swap.copies
        assert self.engine.core.swap.host.pool.counts().in_use == 0
        check_idle(self.engine.core)
        assert findable(self.events) == cached(self.engine)

    def _note_waits(self) -> None:
        for request in self.engine.requests.values():
            moved = any(s.state is RequestState.RUNNING for s in request.sequences)
            waits = self._waits[request.request_id] = 0 if moved else self._waits.get(request.request_id, 0) + 1
            self.longest_wait[request.request_id] = max(waits, self.longest_wait.get(request.request_id, 0))

    def kinds(self, request: Submit) -> list[str]:
        """What was told of a request, in order."""
        told = [event for event in self.events if not isinstance(event, Stored | Removed | Cleared)]
        return [
            type(event).__name__ if isinstance(event, Freed) or "reason" not in event.__struct_fields__ else str(event.reason)  # type: ignore[union-attr]
            for event in told
            if event.request == request.external_id
        ]


def findable(events: list[CacheEvent]) -> set[bytes]:
    """What a subscriber knows who heard everything."""
    hashes: set[bytes] = set()
    for event in events:
        match event:
            case Stored():
                hashes.update(event.hashes)
            case Removed():
                assert hashes.issuperset(event.hashes)
                hashes.difference_update(event.hashes)
            case Cleared():
                hashes.clear()
            case _:
                pass
    return hashes


def cached(engine: Engine) -> set[bytes]:
    """What really can be found, on the device or on the host."""
    caches = [engine.kv.prefixes, engine.core.swap.host.cache]
    return {digest for cache in caches for digest, _ in cache.chains()}


def prompts(count: int, seed: int, *, longest: int = 9) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
