"""Real engines publish, a real router listens, and requests go where the cache is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from patience import PATIENCE_S, eventually
from registry_records import make_record

from kvrelay.config import EngineOptions, WorkerOptions
from kvrelay.discovery.static import StaticMembership
from kvrelay.engine.engine import Engine
from kvrelay.ids import new_router_id, new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.router import Router
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.worker.cache_events import CacheEvents
from kvrelay.worker.serving import ServingLoop


class EngineWorker:
    """A whole worker in a thread: everything is real but the computation."""

    def __init__(self) -> None:
        self.id = new_worker_id("whole")
        runner = FakeRunner(num_blocks=64, vocab_size=1000)
        self.engine = Engine(
            options=EngineOptions(check_invariants=True),
            runner=runner,
            worker_id=self.id,
            eos_token_ids=frozenset(),
            max_model_len=runner.max_model_len,
            vocab_size=1000,
            cache_seed="fake",
        )
        self.events = CacheEvents(self.engine.kv.record_events(), self.id, WorkerOptions())
        self.loop = ServingLoop(self.engine, host="127.0.0.1", port=0)
        self.loop.after_turn = self.events.tell
        self.loop.record = make_record(
            id=self.id,
            role=Role.WHOLE,
            serving_address=self.loop.address,
            fingerprint="fake",
            max_model_len=runner.max_model_len,
            events_address=self.events.events_address,
            replay_address=self.events.replay_address,
            block_size=16,
        )
        self._thread = threading.Thread(target=self.loop.run, args=(lambda: None,), daemon=True)
        self._thread.start()

    def cached(self) -> set[bytes]:
        return {digest for digest, _ in self.engine.kv.prefixes.chains()}

    def stop(self) -> None:
        """As often as wanted."""
        if self._thread.is_alive():
            self.loop.stop_asked = True
            self.loop.wake()
            self._thread.join()
            self.loop.close()
            self.events.close()
            self.engine.close()


@pytest.fixture
async def workers() -> AsyncIterator[list[EngineWorker]]:
    made = [EngineWorker() for _ in range(3)]
    yield made
    for worker in made:
        worker.stop()


async def ask(router: Router, prompt: list[int]) -> tuple[str, list[int], int]:
    """The worker that answered, its tokens, and how many of the prompt it had cached."""
    params = SamplingParams(max_tokens=20, temperature=0.0)
    stream = router.submit(GenerateRequest(external_id="client", prompt=prompt, params=params))
    tokens, cached = [], 0
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for output in outputs:
                tokens += output.tokens
                cached = max(cached, output.cached_tokens)
    return stream.decode, tokens, cached


async def test_conversations_go_back_to_the_worker_that_has_them(workers: list[EngineWorker]) -> None:
    router_id, metrics = new_router_id(), Metrics()
    addresses = [worker.loop.address for worker in workers]
    membership = StaticMembership(addresses, router_id=router_id, registration_s=2.0)
    router = Router(membership=membership, metrics=metrics, policy="prefix_aware", router_id=router_id, registration_s=2.0)
    router.start()
    await router.until_usable(3)
    feed = router._feed
    assert feed is not None
    index = feed._index
    prompts = {number: [number * 50 + token % 50 for token in range(100)] for number in range(6)}
    home: dict[int, str] = {}
    for turn in range(3):
        for number, prompt in prompts.items():
            decode, tokens, cached = await ask(router, prompt)
            assert home.setdefault(number, decode) == decode
            assert cached == (0 if turn == 0 else (len(prompt) - 21) // 16 * 16)  # the last token sampled has no KV
            prompt += [*tokens, *range(20)]
            await eventually(lambda: all(index.hashes(worker.id) == worker.cached() for worker in workers))
    assert len(set(home.values())) == 3  # equal ones took turns
    assert metrics.routed_cached_tokens.labels("whole")._value.get() > 6 * 96
    gone = workers.pop()
    gone.stop()
    await eventually(lambda: not index.hashes(gone.id))
    assert all(index.hashes(worker.id) for worker in workers)
    router.close()
    assert len(index) == 0
