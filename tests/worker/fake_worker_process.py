"""`python fake_worker_process.py --registry tcp://... [--role ROLE] ...`: a worker process whose runner computes nothing.

Its KV is real memory that a real transport moves, and the runner checks every byte that it would attend to.
"""

from __future__ import annotations

import argparse
import sys

from kvrelay.config import EngineOptions, ModelOptions, WorkerOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.progress import Silent
from kvrelay.runner.fake import FakeRunner
from kvrelay.states import Role
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.layout import kv_layout
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.region import Region, shared_region
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.worker.launcher import LauncherTie
from kvrelay.worker.stage import BuildStage, Setup, Stage, Waker, publishes_events
from kvrelay.worker.worker import run_worker

VOCAB_SIZE = 1000
NUM_BLOCKS = 128


def stage_of(role: Role, transfer: str, transfer_lease_s: float, step_time_s: float) -> BuildStage:
    def build(setup: Setup) -> Stage:
        worker_id, options = setup.worker_id, setup.engine
        regions: list[Region] = []

        def allocate(size_bytes: int) -> Region:
            regions.append(shared_region(size_bytes))
            return regions[0]

        runner = FakeRunner(
            num_blocks=NUM_BLOCKS,
            vocab_size=VOCAB_SIZE,
            block_size=options.block_size,
            step_time_s=step_time_s,
            allocate=allocate,
        )
        waker = Waker()
        producer: RelayProducer | None = None
        consumer: RelayConsumer | None = None
        if role is not Role.WHOLE:
            parts = RelayParts(
                worker_id=worker_id,
                layout=kv_layout(runner.layout),
                region=regions[0],
                engines=[make_engine(transfer, worker_id)],
                fingerprint=runner.fingerprint,
                host=host_identity(),
                settings=TransferSettings(lease_s=transfer_lease_s),
                on_news=waker,
            )
            producer = RelayProducer(parts) if role is Role.PREFILL else None
            consumer = RelayConsumer(parts) if role is Role.DECODE else None
        engine = Engine(
            options=options,
            runner=runner,
            worker_id=worker_id,
            eos_token_ids=frozenset(),
            max_model_len=runner.max_model_len,
            vocab_size=VOCAB_SIZE,
            cache_seed="fake",
            producer=producer,
            consumer=consumer,
        )
        return Stage(
            engine=engine,
            fingerprint="fake",
            max_model_len=runner.max_model_len,
            signal_address="" if producer is None else producer.signal_address,
            recorder=engine.kv.record_events() if publishes_events(options) else None,
            waker=waker,
        )

    return build


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True)
    parser.add_argument("--role", default="whole")
    parser.add_argument("--launcher-fd", type=int)
    parser.add_argument("--registration-s", type=float, default=1.0)
    parser.add_argument("--worker-port", type=int, default=0)
    parser.add_argument("--transfer", default="shm")
    parser.add_argument("--transfer-lease-s", type=float, default=30.0)
    parser.add_argument("--step-time-s", type=float, default=0.002)
    parser.add_argument("--token-budget", type=int, default=512)
    given = parser.parse_args()
    return run_worker(
        ModelOptions(),
        EngineOptions(check_invariants=True, token_budget=given.token_budget),
        WorkerOptions(
            registry=given.registry, role=given.role, registration_s=given.registration_s, worker_port=given.worker_port
        ),
        read_environment(),
        Silent(),
        stage_of(Role(given.role), given.transfer, given.transfer_lease_s, given.step_time_s),
        tie=None if given.launcher_fd is None else LauncherTie(given.launcher_fd),
    )


if __name__ == "__main__":
    sys.exit(main())
