"""An engine of this process, built as a worker builds it and driven by messages as a worker drives it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.ids import RequestId, new_request_id, new_worker_id
from kvrelay.progress import Progress
from kvrelay.runner.build import build_runner
from kvrelay.runner.runner import TorchRunner
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.serving import Submit


def build_engine(model: ModelOptions, options: EngineOptions, folder: pathlib.Path, progress: Progress) -> Engine:
    return build_engine_and_runner(model, options, folder, progress)[0]


def build_engine_and_runner(
    model: ModelOptions, options: EngineOptions, folder: pathlib.Path, progress: Progress
) -> tuple[Engine, TorchRunner]:
    options = options.for_device(model.device)
    runner = build_runner(model, options, folder, read_environment(), progress)
    engine = Engine(
        options=options,
        runner=runner,
        worker_id=new_worker_id(Role.WHOLE),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
    )
    return engine, runner


def generate(
    engine: Engine, prompts: Sequence[list[int]], *, max_tokens: int, params: SamplingParams | None = None
) -> list[list[int]]:
    """All at once, greedily unless told otherwise, past every end-of-text token."""
    params = params or SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    outputs: dict[RequestId, list[int]] = {}
    for prompt in prompts:
        request_id = new_request_id()
        outputs[request_id] = []
        engine.submit(Submit(request_id=request_id, external_id=request_id, prompt=prompt, params=params))
    while engine.has_work:
        step = engine.step()
        for failure in step.failures:
            raise BenchError(f"the engine refused a request: {failure.message}")
        for output in step.outputs:
            outputs[output.request_id] += output.tokens
    return list(outputs.values())
