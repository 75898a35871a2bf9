"""Every worker is drained and replaced in its turn while requests keep coming: none of them fails or notices."""

from __future__ import annotations

import asyncio
import itertools

from patience import PATIENCE_S
from stub_worker import StubWorker, stub_token

from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.router import Router
from kvrelay.sampling import SamplingParams

NUM_WORKERS = 3
NUM_CLIENTS = 8
NUM_TOKENS = 20


async def ask(router: Router, number: int) -> None:
    """One request, which must end with the tokens of its own prompt."""
    prompt = [number, 3]
    params = SamplingParams(max_tokens=NUM_TOKENS, n=1 + number % 2)
    stream = router.submit(GenerateRequest(external_id="client", prompt=prompt, params=params))
    tokens: dict[int, list[int]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for output in outputs:
                assert len(tokens.setdefault(output.sample, [])) == output.position
                tokens[output.sample] += output.tokens
    expected = {sample: [stub_token(prompt, sample, at) for at in range(NUM_TOKENS)] for sample in range(params.n)}
    assert tokens == expected


async def test_a_rolling_restart_fails_no_request() -> None:
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    router = Router(membership=membership, metrics=Metrics(), registration_s=4.0, model="stub")
    router.start()
    room = {"max_batch": NUM_CLIENTS, "max_queue": NUM_CLIENTS}
    workers = [StubWorker(membership.address, **room) for _ in range(NUM_WORKERS)]
    over, numbers, served = asyncio.Event(), itertools.count(), itertools.count()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await router.until_usable(NUM_WORKERS)

        async def keep_asking() -> None:
            while not over.is_set():
                await ask(router, next(numbers))
                next(served)

        clients = [asyncio.create_task(keep_asking()) for _ in range(NUM_CLIENTS)]
        for old in list(workers):
            workers.append(StubWorker(membership.address, **room))
            async with asyncio.timeout(PATIENCE_S):
                await router.until_usable(NUM_WORKERS + 1)
            old.drain()
            await asyncio.to_thread(old.join)
            assert not [task for task in clients if task.done()], "a request failed"
        over.set()
        await asyncio.gather(*clients)
        assert next(served) >= NUM_CLIENTS * NUM_WORKERS
        assert router.cluster()["in_flight"] == 0
        assert {entry["id"] for entry in router.cluster()["workers"]} == {worker.id for worker in workers[NUM_WORKERS:]}
        assert all(worker.engine.submitted for worker in workers[NUM_WORKERS:])
    finally:
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))
        router.close()
