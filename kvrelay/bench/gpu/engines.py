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
from kvrelay.wire.serving import StepOutputs, Submit


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


def submit(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[RequestId]:
    request_ids = [new_request_id() for _ in prompts]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        engine.submit(Submit(request_id=request_id, external_id=request_id, prompt=prompt, params=params))
    return request_ids


def step(engine: Engine) -> StepOutputs:
    outputs = engine.step()
    for failure in outputs.failures:
        raise BenchError(f"the engine refused a request: {failure.message}")
    return outputs


def greedily(max_tokens: int) -> SamplingParams:
    """Past every end-of-text token."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def generate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """The outputs of all prompts, submitted at once."""
    outputs: dict[RequestId, list[int]] = {request_id: [] for request_id in submit(engine, prompts, params)}
    while engine.has_work:
        for output in step(engine).outputs:
            outputs[output.request_id] += output.tokens
    return list(outputs.values())
