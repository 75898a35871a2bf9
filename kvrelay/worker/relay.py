"""The two halves of a split worker: one computes prompts and hands their KV on, the other takes it over and generates.

memory for KV that peers can reach -> runner in it -> transports registered with it -> producer or consumer -> engine
"""

from __future__ import annotations

from kvrelay.config import TransferOptions
from kvrelay.engine.engine import Engine
from kvrelay.runner.build import build_runner
from kvrelay.runner.runner import TorchRunner
from kvrelay.states import Role
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.layout import kv_layout
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.region import Region, Share, shared_region
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.worker.images import Reach, open_images, relay_parts
from kvrelay.worker.stage import BuildStage, Setup, Stage, Waker, publishes_events
from kvrelay.worker.transports import check_ranks, open_engines, signal_port


def relay_stage(role: Role, options: TransferOptions, host: str, port: int = 0) -> BuildStage:
    """How to build a prefill or a decode worker that listens on `host`. Signal port 0 is any free one."""

    def build(setup: Setup) -> Stage:
        shared: list[Region] = []  # host memory that other processes can map; none on a GPU

        def allocate(size_bytes: int) -> Region:
            shared.append(shared_region(size_bytes))
            return shared[0]

        check_ranks(options.transfer, setup.model)
        waker = Waker()
        embeddings = relay_parts(setup, Reach(options, host, waker, on_card=role is Role.PREFILL))
        runner = build_runner(
            setup.model,
            setup.engine,
            setup.folder,
            setup.environment,
            setup.progress,
            allocate,
            on_rank_death=setup.on_rank_death,
        )
        region = shared[0] if shared else _memory_of(runner)
        parts = RelayParts(
            worker_id=setup.worker_id,
            layout=kv_layout(runner.layout),
            region=region,
            engines=open_engines(options.transfer, setup.worker_id, host, region.device, several_cards=bool(region.shares)),
            fingerprint=runner.fingerprint,
            host=host_identity(),
            settings=TransferSettings(lease_s=options.transfer_lease_s),
            on_news=waker,
        )
        with signal_port(host, port):
            producer = RelayProducer(parts, listen_host=host, listen_port=port) if role is Role.PREFILL else None
        consumer = RelayConsumer(parts) if role is Role.DECODE else None
        engine = Engine(
            options=setup.engine,
            runner=runner,
            worker_id=setup.worker_id,
            eos_token_ids=runner.eos_token_ids,
            max_model_len=runner.max_model_len,
            vocab_size=runner.spec.vocab_size,
            cache_seed=runner.fingerprint,
            producer=producer,
            consumer=consumer,
            images=open_images(setup, runner, parts=embeddings),
            adapters=runner.adapters,
        )
        return Stage(
            engine=engine,
            fingerprint=runner.fingerprint,
            max_model_len=runner.max_model_len,
            signal_address="" if producer is None else producer.signal_address,
            recorder=engine.kv.record_events() if publishes_events(setup.engine) else None,
            waker=waker,
            adapters=runner.adapters,
        )

    return build


def _memory_of(runner: TorchRunner) -> Region:
    """On a GPU, what PyTorch allocated, in every rank."""
    kv = runner.kv
    shares = tuple(Share(address, share.handle, share.offset) for address, share in runner.kv_of_ranks)
    size_bytes = (1 + len(shares)) * kv.numel() * kv.element_size()
    return Region(address=kv.data_ptr(), size_bytes=size_bytes, device=str(kv.device), shares=shares)
