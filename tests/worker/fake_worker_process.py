"""`python fake_worker_process.py REGISTRY [LAUNCHER_FD]`: a worker process whose runner computes nothing."""

from __future__ import annotations

import sys

from kvrelay.config import EngineOptions, Environment, ModelOptions, WorkerOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.ids import WorkerId
from kvrelay.progress import Progress, Silent
from kvrelay.runner.fake import FakeRunner
from kvrelay.worker.launcher import LauncherTie
from kvrelay.worker.stage import Stage
from kvrelay.worker.worker import run_worker

VOCAB_SIZE = 1000


def build_stage(
    worker_id: WorkerId, model: ModelOptions, options: EngineOptions, environment: Environment, progress: Progress
) -> Stage:
    runner = FakeRunner(num_blocks=64, vocab_size=VOCAB_SIZE, block_size=options.block_size, step_time_s=0.002)
    engine = Engine(
        options=options,
        runner=runner,
        worker_id=worker_id,
        eos_token_ids=frozenset(),
        max_model_len=runner.max_model_len,
        vocab_size=VOCAB_SIZE,
        cache_seed="fake",
    )
    return Stage(engine=engine, fingerprint="fake", max_model_len=runner.max_model_len)


def main() -> int:
    launched = len(sys.argv) > 2
    if launched:
        LauncherTie(int(sys.argv[2]))
    return run_worker(
        ModelOptions(),
        EngineOptions(check_invariants=True),
        WorkerOptions(registry=sys.argv[1], lease_s=1.0),
        read_environment(),
        Silent(),
        build_stage,
        launched=launched,
    )


if __name__ == "__main__":
    sys.exit(main())
