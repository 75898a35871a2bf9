"""The real engine in this process, driven as a worker drives it: messages in, one `step` after another."""

from __future__ import annotations

import pathlib

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.ids import new_worker_id
from kvrelay.progress import Progress, Silent
from kvrelay.runner.build import build_runner
from kvrelay.runner.fake import FakeRunner
from kvrelay.runner.runner import TorchRunner
from kvrelay.states import Role
from kvrelay.transfer.region import shared_region
from kvrelay.wire.serving import Failure, StepOutputs, of_kind


def build_engine(model: ModelOptions, options: EngineOptions, progress: Progress | None = None) -> tuple[Engine, TorchRunner]:
    """`model.model` is a folder."""
    allocate = shared_region if model.tp > 1 else None
    runner = build_runner(model, options, pathlib.Path(model.model), read_environment(), progress or Silent(), allocate)
    return engine_over(runner, options, runner.spec.vocab_size), runner


def engine_over(runner: TorchRunner | FakeRunner, options: EngineOptions, vocab_size: int) -> Engine:
    return Engine(
        options=options,
        runner=runner,
        worker_id=new_worker_id(Role.WHOLE),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=vocab_size,
        cache_seed=runner.fingerprint,
        adapters=runner.adapters if isinstance(runner, TorchRunner) else None,
    )


def step(engine: Engine) -> StepOutputs:
    """Raises BenchError if a request was refused."""
    outputs = engine.step()
    for failure in of_kind(Failure, outputs.news):
        raise BenchError(f"the engine refused a request: {failure.message}")
    return outputs


def run_dry(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
