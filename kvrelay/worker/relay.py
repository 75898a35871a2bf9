"""The two halves of a split worker: one computes prompts and hands their KV on, the other takes it over and generates.

memory for KV that peers can reach -> runner in it -> transports registered with it -> producer or consumer -> engine
"""

from __future__ import annotations

from typing import Any

import zmq

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import EngineOptions, Environment, ModelOptions, TransferOptions
from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError
from kvrelay.ids import WorkerId
from kvrelay.progress import Progress
from kvrelay.runner.build import build_runner
from kvrelay.runner.runner import TorchRunner
from kvrelay.states import Role
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.layout import KVLayout, kv_layout
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.region import Region, shared_region
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.worker.images import Reach, open_images
from kvrelay.worker.stage import BuildStage, Stage, Waker, publishes_events
from kvrelay.worker.transports import open_engines


def relay_stage(role: Role, options: TransferOptions, host: str, signal_port: int = 0) -> BuildStage:
    """How to build a prefill or a decode worker that listens on `host`. Port 0 is any free one."""

    def build(
        worker_id: WorkerId,
        model_options: ModelOptions,
        engine_options: EngineOptions,
        environment: Environment,
        progress: Progress,
    ) -> Stage:
        folder = resolve(model_options.model, environment, progress)
        memory = _Memory()
        runner = build_runner(model_options, engine_options, folder, environment, progress, memory.allocate)
        waker = Waker()
        parts = RelayParts(
            worker_id=worker_id,
            layout=kv_layout(runner.layout),
            region=memory.region(runner),
            engines=open_engines(options.transfer, worker_id, host, str(runner.kv.device)),
            fingerprint=runner.fingerprint,
            host=host_identity(),
            settings=TransferSettings(lease_s=options.transfer_lease_s),
            on_news=waker,
        )
        producer = _producer(parts, host, signal_port) if role is Role.PREFILL else None
        consumer = RelayConsumer(parts) if role is Role.DECODE else None
        reach = Reach(options, host, waker)
        images = open_images(worker_id, model_options, engine_options, folder, runner, reach=reach)
        engine = Engine(
            options=engine_options,
            runner=runner,
            worker_id=worker_id,
            eos_token_ids=runner.eos_token_ids,
            max_model_len=runner.max_model_len,
            vocab_size=runner.spec.vocab_size,
            cache_seed=runner.fingerprint,
            producer=producer,
            consumer=consumer,
            images=images,
        )
        return Stage(
            engine=engine,
            fingerprint=runner.fingerprint,
            max_model_len=runner.max_model_len,
            signal_address="" if producer is None else producer.signal_address,
            recorder=engine.kv.record_events() if publishes_events(engine_options) else None,
            waker=waker,
        )

    return build


def _producer(parts: RelayParts[KVLayout], host: str, port: int) -> RelayProducer:
    try:
        return RelayProducer(parts, listen_host=host, listen_port=port)
    except zmq.ZMQError as error:
        reason = error.strerror or error
        raise ConfigError(f"the signal plane cannot listen on {host}:{port} (--signal-port): {reason}") from error


class _Memory:
    """Host memory that other processes can map; on a GPU, the memory that PyTorch allocated."""

    def __init__(self) -> None:
        self._shared: Region | None = None

    def allocate(self, size_bytes: int) -> Any:
        self._shared = shared_region(size_bytes)
        return self._shared.buffer

    def region(self, runner: TorchRunner) -> Region:
        if self._shared is not None:
            return self._shared
        kv = runner.kv
        return Region(address=kv.data_ptr(), size_bytes=kv.numel() * kv.element_size(), device=str(kv.device))
