"""A whole cluster in one process: a real router, real serving loops in threads, real movers over real sockets and a real
transport. Only the model is small: the fake runner, whose KV is checked token by token, or a tiny checkpoint.

    async with relay(Shape(prefill=2, decode=2)) as cluster:
        answers = await cluster.answers(requests)

Leaving the block is the leak check: every worker must have told the router that it is idle, and hold nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from leaks import check_idle
from patience import PATIENCE_S
from server import is_idle

from kvrelay.config import EngineOptions, ModelOptions, TransferOptions, read_environment
from kvrelay.discovery.base import OnChanged, OnJoined, OnLeft
from kvrelay.engine.engine import Engine
from kvrelay.engine.movers import NoRelay
from kvrelay.errors import RequestError
from kvrelay.ids import KeptId, RequestId, WorkerId, new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.progress import Silent
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.router import Router
from kvrelay.router.stream import RequestStream
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, Role, WorkerState
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.engines.memory import MemoryEngine, MemoryNetwork
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.layout import kv_layout
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.region import Region, shared_region
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.serving import Failure, Finish, KeptInfo, StepOutputs, Submit, TokenLogprobs, of_kind
from kvrelay.worker.relay import relay_stage
from kvrelay.worker.serving import EngineFailedError, ServingLoop
from kvrelay.worker.stage import Setup, Stage, Waker

VOCAB = 997
EOS = 0
Transfer = Literal["memory", "shm", "nixl", "mooncake"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a cluster is made of. Block sizes are in tokens; pools, in blocks of their own size."""

    prefill: int = 1
    decode: int = 1
    mode: Literal["write", "read"] = "write"
    transfer: Transfer = "shm"
    local_prefill_tokens: int = 0
    block_sizes: tuple[int, int] = (16, 16)  # of prefill and decode workers
    num_blocks: tuple[int, int] = (256, 256)
    max_model_len: int = 256
    max_batch: int = 32
    token_budget: int = 128
    prefix_cache: bool = True
    check_invariants: bool = True
    eos_one_in: int = 0
    checkpoint: str = ""  # a folder: the real runner instead of the fake one
    tp: tuple[int, int] = (1, 1)  # ranks of a prefill and of a decode worker, with a checkpoint
    kv_dtype: Literal["auto", "fp8"] = "auto"  # with a checkpoint
    lora: tuple[str, ...] = ()  # adapters of all workers, with a checkpoint: NAME=FOLDER
    swap_blocks: int | Literal["auto"] = "auto"
    settings: TransferSettings = TransferSettings()
    wrap: Callable[[TransferEngine], TransferEngine] | None = None  # around each transport of the fake runner's workers

    def engine_options(self, role: Role) -> EngineOptions:
        side = 0 if role is Role.PREFILL else 1
        return EngineOptions(
            block_size=self.block_sizes[side],
            kv_blocks=self.num_blocks[side],
            max_model_len=self.max_model_len,
            max_batch=self.max_batch,
            token_budget=self.token_budget,
            prefix_cache=self.prefix_cache,
            check_invariants=self.check_invariants,
            swap_blocks=self.swap_blocks,
        )


class GatedEngine:
    """An engine that steps only when the test lets it; `permits` None is always."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.permits: int | None = None
        self.steps = False  # right now

    @property
    def has_work(self) -> bool:
        return self.permits != 0 and self.engine.has_work

    @property
    def drained(self) -> bool:
        return self.engine.drained

    def submit(self, submit: Submit) -> None:
        self.engine.submit(submit)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        self.engine.abort(request_ids)

    def finish(self, finish: Finish) -> None:
        self.engine.finish(finish)

    def step(self) -> StepOutputs:
        self.steps = True
        if self.permits is not None:
            self.permits -= 1
        outputs = self.engine.step()
        self.steps = False
        return outputs

    def load(self) -> WorkerLoad:
        return self.engine.load()

    def drain(self) -> None:
        self.engine.drain()

    def peer_lost(self, worker_id: WorkerId) -> None:
        self.engine.peer_lost(worker_id)

    def release_kept(self, kept_ids: Iterable[KeptId]) -> None:
        self.engine.release_kept(kept_ids)

    def find_kept(self, handle: str, owner: str) -> list[KeptInfo]:
        return self.engine.find_kept(handle, owner)

    def close(self) -> None:
        self.engine.close()


class Worker:
    """One engine with its serving loop, in a thread."""

    def __init__(self, role: Role, worker_id: WorkerId, stage: Stage, options: EngineOptions) -> None:
        assert isinstance(stage.engine, Engine)
        self.id = worker_id
        self.role = role
        self.engine = stage.engine
        self.gate = GatedEngine(stage.engine)
        self.failure: BaseException | None = None
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
            max_batch=options.max_batch,
            max_queue=options.max_queue,
            version=PROTOCOL_VERSION,
            load=self.loop.status.load,
            signal_address=stage.signal_address,
            adapters=stage.adapters.records(),
        )
        stage.waker.bind(self.loop.wake)
        self._thread = threading.Thread(target=self._main, name=worker_id, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def allow(self, steps: int | None) -> None:
        """So many more steps; None is as many as it likes."""
        self.gate.permits = steps
        self.loop.wake()

    def halt(self) -> None:
        """The engine is nobody's afterwards: the test may look at it."""
        self.loop.stop_asked = True
        self.loop.wake()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.id} does not stop"

    def close(self) -> None:
        self.halt()
        self.loop.close()
        self.engine.close()

    def check_idle(self) -> None:
        """The leak check, with the books that no block count shows."""
        check_idle(self.engine.core)
        assert self.loop.num_open == 0
        counts = self.engine.load().transfers
        assert counts.in_flight == 0, f"{self.id}: {counts}"
        outgoing, incoming = self.engine.core.outgoing, self.engine.core.incoming
        assert not outgoing.held
        assert not outgoing._submits
        assert not outgoing._first_tokens
        assert not outgoing._started
        assert not outgoing._being_set_aside
        if not isinstance(outgoing.producer, NoRelay):
            assert not outgoing.producer._open  # type: ignore[attr-defined]
            assert not outgoing.producer._aborted  # type: ignore[attr-defined]
        assert not incoming._expected
        assert not incoming._freed
        assert not incoming.quarantined
        if not isinstance(incoming.consumer, NoRelay):
            assert not incoming.consumer._open  # type: ignore[attr-defined]

    def _main(self) -> None:
        try:
            self.loop.run(on_draining=lambda: None)
        except EngineFailedError as error:
            self.failure = error.__cause__


class Members:
    """The registry: these workers, from the beginning."""

    address = ""

    def __init__(self, records: list[WorkerRecord]) -> None:
        self._records = records

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        for record in self._records:
            on_joined(record)

    def close(self) -> None:
        pass


@dataclass
class Answer:
    """What a client would have got."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: RequestError | None = None

    def take(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            known = self.tokens.setdefault(output.sample, [])
            assert output.position == len(known), "tokens out of order"
            assert output.sample not in self.finish, "a sample that had ended spoke again"
            known.extend(output.tokens)
            self.logprobs.setdefault(output.sample, []).extend(output.logprobs or [])
            if output.prompt_logprobs is not None:
                assert self.prompt_logprobs is None, "the logprobs of the prompt came twice"
                self.prompt_logprobs = output.prompt_logprobs
            if output.finish is not None:
                self.finish[output.sample] = output.finish

    @property
    def said(self) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
        assert self.error is None, self.error
        return self.tokens, self.finish


class Cluster:
    """Workers and the router they serve."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._network = MemoryNetwork()
        roles = [Role.PREFILL] * shape.prefill + [Role.DECODE] * shape.decode
        self.workers = [self._make(role) for role in roles]
        self.prefill = [worker for worker in self.workers if worker.role is Role.PREFILL]
        self.decode = [worker for worker in self.workers if worker.role is Role.DECODE]
        self.router = Router(
            membership=Members([worker.loop.record for worker in self.workers if worker.loop.record is not None]),
            metrics=Metrics(),
            mode=shape.mode,
            policy="round_robin",
            local_prefill_tokens=shape.local_prefill_tokens,
            registration_s=60.0,
        )

    async def start(self) -> None:
        for worker in self.workers:
            worker.start()
        self.router.start()
        async with asyncio.timeout(PATIENCE_S):
            await self.router.until_usable(len(self.workers))

    def use_mode(self, mode: Literal["write", "read"]) -> None:
        """As a second router with other options would."""
        self.router._dispatcher._mode = mode

    def submit(self, request: GenerateRequest) -> RequestStream:
        return self.router.submit(request)

    async def answer(self, request: GenerateRequest) -> Answer:
        return await collect(self.submit(request))

    async def answers(self, requests: Iterable[GenerateRequest]) -> list[Answer]:
        streams = [self.submit(request) for request in requests]
        return list(await asyncio.gather(*(collect(stream) for stream in streams)))

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not condition():
            self.check_alive()
            assert asyncio.get_running_loop().time() < deadline, f"waited in vain: {self.router.cluster()['workers']}"
            await asyncio.sleep(0.003)

    def check_alive(self) -> None:
        for worker in self.workers:
            if worker.failure is not None:
                raise worker.failure

    async def idle(self) -> None:
        """Until every worker has told the router that it does and holds nothing."""
        await self.until(lambda: all(is_idle(entry) for entry in self.router.cluster()["workers"]))
        assert self.router.cluster()["in_flight"] == 0

    async def check_idle(self) -> None:
        await self.idle()
        for worker in self.workers:
            worker.halt()
            worker.check_idle()

    async def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.router.close()
        self.check_alive()

    def _make(self, role: Role) -> Worker:
        worker_id = new_worker_id(role.value)
        options = self.shape.engine_options(role)
        stage = self._real_stage if self.shape.checkpoint else self._fake_stage
        return Worker(role, worker_id, stage(role, worker_id, options), options)

    def _real_stage(self, role: Role, worker_id: WorkerId, options: EngineOptions) -> Stage:
        assert self.shape.transfer != "memory"
        build = relay_stage(role, TransferOptions(transfer=self.shape.transfer), "127.0.0.1")
        tp = self.shape.tp[role is Role.DECODE]
        model = ModelOptions(
            model=self.shape.checkpoint, dtype="float32", threads=1, tp=tp, lora=self.shape.lora, kv_dtype=self.shape.kv_dtype
        )
        return build(Setup(worker_id, model, options, read_environment(), Silent()))

    def _fake_stage(self, role: Role, worker_id: WorkerId, options: EngineOptions) -> Stage:
        """What `worker/relay.py` does, around the fake runner."""
        regions: list[Region] = []

        def allocate(size_bytes: int) -> Region:
            regions.append(shared_region(size_bytes))
            return regions[0]

        runner = FakeRunner(
            num_blocks=options.kv_blocks,
            vocab_size=VOCAB,
            block_size=options.block_size,
            eos_token_ids=(EOS,),
            eos_one_in=self.shape.eos_one_in,
            max_model_len=options.max_model_len,
            allocate=allocate,
        )
        waker = Waker()
        parts = RelayParts(
            worker_id=worker_id,
            layout=kv_layout(runner.layout),
            region=regions[0],
            engines=[self._transport(worker_id)],
            fingerprint=runner.fingerprint,
            host="here",
            settings=self.shape.settings,
            on_news=waker,
        )
        producer = RelayProducer(parts) if role is Role.PREFILL else None
        engine = Engine(
            options=options,
            runner=runner,
            worker_id=worker_id,
            eos_token_ids=runner.eos_token_ids,
            max_model_len=runner.max_model_len,
            vocab_size=VOCAB,
            cache_seed=runner.fingerprint,
            producer=producer,
            consumer=RelayConsumer(parts) if role is Role.DECODE else None,
        )
        return Stage(
            engine=engine,
            fingerprint=runner.fingerprint,
            max_model_len=runner.max_model_len,
            signal_address="" if producer is None else producer.signal_address,
            waker=waker,
        )

    def _transport(self, worker_id: WorkerId) -> TransferEngine:
        name = self.shape.transfer
        engine: TransferEngine = MemoryEngine(worker_id, self._network) if name == "memory" else make_engine(name, worker_id)
        return engine if self.shape.wrap is None else self.shape.wrap(engine)


@contextlib.asynccontextmanager
async def relay(shape: Shape) -> AsyncIterator[Cluster]:
    cluster = Cluster(shape)
    try:
        await cluster.start()
        yield cluster
        await cluster.check_idle()
    finally:
        await cluster.close()


async def collect(stream: RequestStream, answer: Answer | None = None) -> Answer:
    """Until its end, as the front end does; `answer` is what came before."""
    answer = answer or Answer()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while outputs := await stream.next():
                answer.take(outputs)
    except RequestError as error:
        answer.error = error
    return answer


def ask(prompt: list[int], **params: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
    sampling.validate()
    return GenerateRequest(external_id="client", prompt=prompt, params=sampling)


def solo(requests: Iterable[GenerateRequest], shape: Shape) -> list[Answer]:
    """What one worker that does everything says to each: no cache, no hand-over."""
    options = EngineOptions(max_batch=256, token_budget=2048, max_queue=100_000, prefix_cache=False)
    runner = FakeRunner(
        num_blocks=8192, vocab_size=VOCAB, eos_token_ids=(EOS,), eos_one_in=shape.eos_one_in, max_model_len=shape.max_model_len
    )
    engine = Engine(
        options=options,
        runner=runner,
        worker_id=new_worker_id("whole"),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=VOCAB,
        cache_seed=runner.fingerprint,
    )
    return run_alone(engine, requests)


def run_alone(engine: Engine, requests: Iterable[GenerateRequest]) -> list[Answer]:
    """Each request's answer of an engine that nobody else uses."""
    answers: dict[RequestId, Answer] = {}
    for number, request in enumerate(requests):
        request_id = RequestId(f"cmpl-00000000-0000-0000-0000-{number:012x}-00000000")
        answers[request_id] = Answer()
        engine.submit(Submit(request_id=request_id, external_id="", prompt=list(request.prompt), params=request.params))
    while engine.has_work:
        step = engine.step()
        assert not of_kind(Failure, step.news), of_kind(Failure, step.news)
        for output in step.outputs:
            answers[output.request_id].take([output])
    engine.close()
    return list(answers.values())


def random_prompts(count: int, seed: int, *, longest: int = 200, vocab: tuple[int, int] = (1, VOCAB)) -> list[list[int]]:
    """Of all lengths; two in three begin as others do, so that both sides' prefix caches are hit, also in mid-block."""
    rng = random.Random(seed)
    draw: Callable[[int], list[int]] = lambda length: [rng.randrange(*vocab) for _ in range(length)]  # noqa: E731
    stems = [draw(length) for length in (7, 16, 24, 33, 48, 64, 90, 128) if length < longest]
    prompts = []
    for _ in range(count):
        length = rng.randint(1, longest)
        stem = rng.choice(stems) if rng.random() < 0.66 else []
        prompts.append((stem + draw(longest))[:length])
    return prompts
