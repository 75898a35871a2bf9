"""A cluster in one process that takes images: a real router and real workers of all roles on a tiny checkpoint.

    async with images(Shape(encode=1, prefill=1, decode=1)) as cluster:
        answer = await cluster.answer(ask(prompt))

Leaving the block is the leak check.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from cluster import Answer, GatedEngine, Members, collect
from leaks import check_idle
from patience import PATIENCE_S
from server import is_idle
from vision_models import Kind, Prompt, tiny_vl

from kvrelay.config import EngineOptions, ModelOptions, TransferOptions, read_environment
from kvrelay.engine.encode import EncodeEngine
from kvrelay.engine.engine import Engine
from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.progress import Silent
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.failover import RetryRules
from kvrelay.router.policy import PolicyName
from kvrelay.router.router import Router
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role, WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import ImageCounts, WorkerRecord
from kvrelay.wire.serving import Encode
from kvrelay.worker.build import stage_of
from kvrelay.worker.embedding_intake import EmbeddingIntake
from kvrelay.worker.serving import EngineFailedError, ServingLoop
from kvrelay.worker.stage import Setup, Stage

ENGINE = EngineOptions(
    block_size=8,
    kv_blocks=512,
    max_model_len=1024,
    max_batch=16,
    token_budget=64,
    check_invariants=True,
    feature_cache_mib=64,
)
TRANSFER = TransferOptions(transfer="shm", embedding_pool_tokens=2048, embedding_buffer_tokens=256)


@dataclass(frozen=True, kw_only=True)
class Shape:
    encode: int = 0
    prefill: int = 0
    decode: int = 0
    whole: int = 0
    kind: Kind = "qwen3_vl"
    policy: PolicyName = "least_loaded"
    engine: dict[str, Any] = field(default_factory=dict)  # what differs from ENGINE
    transfer: dict[str, Any] = field(default_factory=dict)
    local_prefill_tokens: int = 0
    tp: dict[Role, int] = field(default_factory=dict)  # ranks of the workers of a role, if more than one

    @property
    def roles(self) -> list[Role]:
        counts = {
            Role.ENCODE: self.encode,
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.WHOLE: self.whole,
        }
        return [role for role, count in counts.items() for _ in range(count)]


class Gate(GatedEngine):
    def encode(self, encode: Encode) -> None:
        self.engine.encode(encode)


class Worker:
    """One stage with its serving loop, in a thread."""

    def __init__(self, role: Role, worker_id: WorkerId, stage: Stage) -> None:
        self.id = worker_id
        self.role = role
        self.engine: Any = stage.engine
        self.gate = Gate(self.engine)
        self.failure: BaseException | None = None
        self.is_gone = False
        self.loop = ServingLoop(self.gate, host="127.0.0.1", port=0)
        self.loop.record = WorkerRecord(
            id=worker_id,
            role=role,
            state=WorkerState.READY,
            host="here",
            pid=0,
            serving_address=self.loop.address,
            model="tiny",
            fingerprint=stage.fingerprint,
            max_model_len=stage.max_model_len,
            max_batch=16,
            max_queue=512,
            version=PROTOCOL_VERSION,
            load=self.loop.status.load,
            signal_address=stage.signal_address,
        )
        stage.waker.bind(self.loop.wake)
        self._thread = threading.Thread(target=self._main, name=worker_id, daemon=True)
        self._thread.start()

    @property
    def images(self) -> ImageCounts:
        counts: ImageCounts = self.engine.load().images
        return counts

    def allow(self, steps: int | None) -> None:
        """So many more steps; None is as many as it likes."""
        self.gate.permits = steps
        self.loop.wake()

    def halt(self) -> None:
        self.loop.stop_asked = True
        self.loop.wake()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.id} does not stop"

    def kill(self) -> None:
        """As a process that dies: its sockets are closed, and nobody is told anything."""
        self.loop._is_over = lambda: True
        self.is_gone = True
        self.close()

    def close(self) -> None:
        self.halt()
        self.loop.close()
        self.engine.close()

    @property
    def is_quiet(self) -> bool:
        load = self.engine.load()
        blocks = load.blocks
        held = blocks.in_use + blocks.reserved + blocks.sending + blocks.quarantined
        return self.loop.num_open == load.transfers.in_flight == load.images.in_flight == load.images.held == held == 0

    def check_idle(self) -> None:
        assert self.loop.num_open == 0
        load = self.engine.load()
        assert load.transfers.in_flight == load.images.in_flight == load.images.held == 0, load
        if isinstance(self.engine, EncodeEngine):
            assert not self.engine._open
            assert not self.engine._jobs
            assert not self.engine._waiting
            assert not self.engine._made
            producer: Any = self.engine._producer
            pool = producer.pool_counts()
        else:
            assert isinstance(self.engine, Engine)
            check_idle(self.engine.core)
            assert not self.engine.core.images._wants
            (intake,) = (source for source in self.engine.core.images._sources if isinstance(source, EmbeddingIntake))
            assert not intake._by_digest
            assert not intake._by_transfer
            pool = intake._consumer.pool_counts()
        assert pool.free == pool.total, f"{self.id} holds embedding blocks: {pool}"

    def _main(self) -> None:
        try:
            self.loop.run(on_draining=lambda: None)
        except EngineFailedError as error:
            self.failure = error.__cause__


class Cluster:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.workers = [self._make(role) for role in shape.roles]
        self.members = Members([worker.loop.record for worker in self.workers if worker.loop.record is not None])
        self.router = Router(
            membership=self.members,
            metrics=Metrics(),
            policy=shape.policy,
            local_prefill_tokens=shape.local_prefill_tokens,
            registration_s=60.0,
            rules=RetryRules(wait_s=0.0),
        )

    def _make(self, role: Role) -> Worker:
        worker_id = new_worker_id(role.value)
        options = msgspec.structs.replace(TRANSFER, **self.shape.transfer)
        engine_options = msgspec.structs.replace(ENGINE, **self.shape.engine)
        model = ModelOptions(model=str(tiny_vl(self.shape.kind)), dtype="float32", threads=1, tp=self.shape.tp.get(role, 1))
        stage = stage_of(role, options, "127.0.0.1")(Setup(worker_id, model, engine_options, read_environment(), Silent()))
        return Worker(role, worker_id, stage)

    def of(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role]

    @property
    def encode(self) -> Worker:
        return self.of(Role.ENCODE)[0]

    @property
    def prefill(self) -> Worker:
        return self.of(Role.PREFILL)[0]

    @property
    def decode(self) -> Worker:
        return self.of(Role.DECODE)[0]

    @property
    def whole(self) -> Worker:
        return self.of(Role.WHOLE)[0]

    def submit(self, request: GenerateRequest) -> RequestStream:
        return self.router.submit(request)

    async def answer(self, request: GenerateRequest) -> list[int]:
        answer = await collect(self.submit(request))
        if answer.error is not None:
            raise answer.error
        return answer.tokens[0]

    async def answers(self, requests: Iterable[GenerateRequest]) -> list[Answer]:
        streams = [self.submit(request) for request in requests]
        return list(await asyncio.gather(*(collect(stream) for stream in streams)))

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not condition():
            self.check_alive()
            assert asyncio.get_running_loop().time() < deadline, f"waited in vain: {self.router.cluster()['workers']}"
            await asyncio.sleep(0.001)

    def check_alive(self) -> None:
        for worker in self.workers:
            if worker.failure is not None:
                raise worker.failure

    async def idle(self) -> None:
        alive = {worker.id for worker in self.workers if not worker.is_gone}

        def is_over() -> bool:
            entries = [entry for entry in self.router.cluster()["workers"] if entry["id"] in alive]
            return all(is_idle(entry) for entry in entries)

        await self.until(is_over)
        # What the router was told last may be from before a request that failed at once.
        await self.until(lambda: all(worker.is_quiet for worker in self.workers if not worker.is_gone))

    async def check_idle(self) -> None:
        await self.idle()
        for worker in self.workers:
            if not worker.is_gone:
                worker.halt()
                worker.check_idle()


@contextlib.asynccontextmanager
async def images(shape: Shape) -> AsyncIterator[Cluster]:
    cluster = Cluster(shape)
    try:
        cluster.router.start()
        async with asyncio.timeout(PATIENCE_S):
            await cluster.router.until_usable(len(cluster.workers))
        yield cluster
        await cluster.check_idle()
    finally:
        for worker in cluster.workers:
            if not worker.is_gone:
                worker.close()
        cluster.router.close()
    cluster.check_alive()


def ask(prompt: Prompt, max_tokens: int = 6, **fields: Any) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(external_id="client", prompt=prompt.tokens, params=params, images=prompt.images, **fields)
