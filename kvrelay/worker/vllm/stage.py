"""A worker whose engine is vLLM's.

options -> vLLM's core, with its KV memory where peers can reach it -> relay -> engine
"""

from __future__ import annotations

import hashlib

from kvrelay.checkpoint.digest import weights_digest
from kvrelay.config import TransferOptions
from kvrelay.errors import ConfigError
from kvrelay.states import Role
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.worker.stage import BuildStage, Setup, Stage, Waker, publishes_events
from kvrelay.worker.transports import open_engines, signal_port
from kvrelay.worker.vllm.book import Book
from kvrelay.worker.vllm.engine import CoreEngine, HandOver, NoHandOver
from kvrelay.worker.vllm.events import CacheListener
from kvrelay.worker.vllm.memory import Shared, share
from kvrelay.worker.vllm.options import engine_arguments
from kvrelay.worker.vllm.receiving import Receiving
from kvrelay.worker.vllm.requests import Limits
from kvrelay.worker.vllm.sending import Sending


def vllm_stage(role: Role, options: TransferOptions, host: str, port: int = 0) -> BuildStage:
    """How to build a worker that its peers reach at `host`. Signal port 0 is any free one."""

    def build(setup: Setup) -> Stage:
        shared, waker = share(setup.worker_id), Waker()
        arguments = engine_arguments(setup, role, shared)
        try:
            from kvrelay.worker.vllm.core import VERSION, open_core
        except ImportError as error:
            raise ConfigError(f"--engine vllm needs vLLM (pip install kvrelay[vllm]): {error}") from error
        core = open_core(arguments, setup.model.threads, shared, setup.on_rank_death)
        fingerprint = f"vllm-{VERSION}-{core.dtype}-{_model_digest(setup)}"
        book = Book(core)
        signal_address = ""
        hand_over: HandOver = NoHandOver()
        if role is not Role.WHOLE:
            parts = _relay_parts(setup, shared, options, host, fingerprint, waker)
            if role is Role.PREFILL:
                with signal_port(host, port):
                    producer = RelayProducer(parts, listen_host=host, listen_port=port)
                signal_address = producer.signal_address
                hand_over = shared.hooks = Sending(producer, book, parts.layout.num_layers)
            else:
                hand_over = shared.hooks = Receiving(RelayConsumer(parts), book)
        listener = None
        if publishes_events(setup.engine):
            listener = CacheListener(fingerprint, core.block_size, core.counts().total)
            book.on_over = listener.over
            core.listen(listener)
        limits = Limits(
            worker_id=setup.worker_id, role=role, max_queue=setup.engine.max_queue, max_batch=core.max_batch, core=core
        )
        return Stage(
            engine=CoreEngine(book, limits, hand_over),
            fingerprint=fingerprint,
            max_model_len=core.max_model_len,
            signal_address=signal_address,
            recorder=None if listener is None else listener.recorder,
            waker=waker,
            block_size=core.block_size,
        )

    return build


def _relay_parts(
    setup: Setup, shared: Shared, options: TransferOptions, host: str, fingerprint: str, waker: Waker
) -> RelayParts[KVLayout]:
    assert shared.layout is not None
    assert shared.region is not None
    return RelayParts(
        worker_id=setup.worker_id,
        layout=shared.layout,
        region=shared.region,
        engines=open_engines(options.transfer, setup.worker_id, host, shared.region.device),
        fingerprint=fingerprint,
        host=host_identity(),
        settings=TransferSettings(lease_s=options.transfer_lease_s),
        on_news=waker,
    )


def _model_digest(setup: Setup) -> str:
    """vLLM serves models that kvrelay cannot read: what is compared is their files."""
    config = hashlib.sha256((setup.folder / "config.json").read_bytes()).hexdigest()[:16]
    return f"{config}-{'dummy' if setup.model.load == 'dummy' else weights_digest(setup.folder)}"
