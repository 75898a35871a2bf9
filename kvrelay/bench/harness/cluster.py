"""Worker processes with their router in this process, so that a benchmark sees each token as it comes.

    async with live_cluster(model, engine, options) as cluster:     returns when every worker is usable
        cluster.router                                              the workers are registered with this one
        await cluster.add_router(policy)                            another over the same workers, which chooses in its own way
        await ask(router, prompt, params)                           one request to its end
        answer = start(router, prompt, params)                      one that runs; `finish(answer)` waits for its end

Everything runs on one event loop. The workers are watched as those of `kvrelay serve` are: one that dies is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.bench.harness.workload import draw
from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import ClusterOptions, EngineOptions, ModelOptions, RouterOptions, TransferOptions
from kvrelay.errors import BenchError, RequestError
from kvrelay.ids import new_request_id
from kvrelay.launch.cluster import FREE_LOCAL_PORT, WorkerSettings, local_cluster, open_router, worker_roles
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.policy import PolicyName
from kvrelay.router.router import Router
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Image

_START_S = 120.0
_ANSWER_S = 120.0
_LOOK_EVERY_S = 0.001
_REST_S = 30.0
_NEWS_S = 0.3  # after which the counts of the last request have come from its worker


@dataclass(slots=True, eq=False)
class Answer:
    """One request and what came of it, in seconds of `time.perf_counter`."""

    num_prompt_tokens: int
    submitted_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    tokens_at: list[float] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompt: not computed anew
    problem: str = ""
    stream: RequestStream | None = None
    task: asyncio.Task[None] | None = None

    @property
    def times(self) -> list[float]:
        """When its tokens came. Raises BenchError if it failed."""
        if self.problem or not self.tokens_at:
            raise BenchError(f"a request failed: {self.problem or 'it had no token'}")
        return self.tokens_at

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.submitted_at

    @property
    def decode(self) -> str:
        """The worker that generates it now."""
        return "" if self.stream is None else self.stream.decode


def start(router: Router, prompt: list[int], params: SamplingParams, images: Sequence[Image] = ()) -> Answer:
    """The answer is filled as the tokens come. A request that fails leaves its problem there."""
    answer = Answer(len(prompt), submitted_at=time.perf_counter())
    request = GenerateRequest(external_id=new_request_id(), prompt=prompt, params=params, images=images)
    answer.task = asyncio.create_task(_follow(router, request, answer))
    return answer


async def finish(answer: Answer) -> Answer:
    assert answer.task is not None
    try:
        async with asyncio.timeout(_ANSWER_S):  # Python 3.11's `wait_for` loses a cancellation that comes with the answer
            await answer.task
    except TimeoutError:
        answer.problem = f"no answer within {_ANSWER_S:g} s"
    return answer


async def ask(router: Router, prompt: list[int], params: SamplingParams, images: Sequence[Image] = ()) -> Answer:
    return await finish(start(router, prompt, params, images))


async def abort(answers: Sequence[Answer]) -> None:
    tasks = [answer.task for answer in answers if answer.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _follow(router: Router, request: GenerateRequest, answer: Answer) -> None:
    try:
        stream = answer.stream = router.submit(request)
        try:
            while outputs := await stream.next():
                now = time.perf_counter()
                for output in outputs:
                    answer.cached_tokens = max(answer.cached_tokens, output.cached_tokens)
                    answer.tokens.extend(output.tokens)
                    answer.tokens_at.extend([now] * len(output.tokens))
        finally:
            stream.abort()
    except RequestError as error:
        answer.problem = error.message


class LiveCluster:
    """Made by `live_cluster`, which also ends it."""

    def __init__(self, router: Router, options: ClusterOptions, num_workers: int, vocabulary: range) -> None:
        self.router = router
        self.num_workers = num_workers
        self.vocabulary = vocabulary
        self._options = options
        self._random = random.Random(1)
        self._others: list[Router] = []

    def draw(self, num_tokens: int) -> list[int]:
        """A prompt that no cache has seen. Every cluster gives the same ones in the same order."""
        return draw(self._random, num_tokens, self.vocabulary)

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = msgspec.to_builtins(self.router.cluster()["workers"])
        return workers

    def pin(self, cores: Mapping[str, Sequence[int]]) -> None:
        """Workers by role: all threads that a process has now; later ones inherit it."""
        for worker in self.workers():
            for task in pathlib.Path(f"/proc/{worker['pid']}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores[worker["role"]])

    async def at_rest(self) -> list[dict[str, Any]]:
        """The workers, with their counts, once nothing is open any more."""
        await wait_until(lambda: not any(map(_is_busy, self.workers())), "the workers come to rest", _REST_S)
        await asyncio.sleep(_NEWS_S)
        return self.workers()

    async def add_router(self, policy: PolicyName) -> Router:
        """It is told the addresses that the workers have now."""
        addresses = ",".join(worker["address"] for worker in self.workers())
        registry = ClusterOptions(registry=f"static:{addresses}", registration_s=self._options.registration_s)
        router, _ = open_router(RouterOptions(policy=policy), registry, Metrics(), "bench", default_listen=FREE_LOCAL_PORT)
        router.start()
        self._others.append(router)
        await self.until_whole(router)
        return router

    async def until_whole(self, router: Router | None = None) -> None:
        """Every worker can take requests, also those that were started again."""
        async with asyncio.timeout(_START_S):
            await (router or self.router).until_usable(self.num_workers)

    def close_others(self) -> None:
        for router in self._others:
            router.close()


@contextlib.asynccontextmanager
async def live_cluster(
    model: ModelOptions, engine: EngineOptions, options: ClusterOptions, policy: PolicyName = "prefix_aware"
) -> AsyncIterator[LiveCluster]:
    """`model.model` is a folder. Raises WorkerDiedError with a worker's own reason."""
    flags = ["--quiet", "--progress=none"]
    workers = WorkerSettings(
        model=model, engine=engine, transfer=TransferOptions(), registration_s=options.registration_s, flags=flags
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_START_S):
                router, _ = await stack.enter_async_context(local_cluster(workers, RouterOptions(policy=policy), options))
        except TimeoutError as error:
            raise BenchError(f"the workers were not ready within {_START_S:g} s") from error
        vocabulary = range(read_spec(pathlib.Path(model.model)).vocab_size)
        cluster = LiveCluster(router, options, len(worker_roles(options)), vocabulary)
        stack.callback(cluster.close_others)
        yield cluster


def _is_busy(worker: dict[str, Any]) -> bool:
    counts = [worker[name] for name in ("running", "waiting", "transferring", "in_flight")]
    return any(counts) or worker["transfers"]["in_flight"] > 0 or worker["images"]["in_flight"] > 0


async def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """When it was found true, to the millisecond."""
    deadline = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > deadline:
            raise BenchError(f"{what}: not within {timeout_s:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    return time.perf_counter()
