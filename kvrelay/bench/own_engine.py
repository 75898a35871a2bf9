"""Our engine as a benchmark's subject: built as a worker builds it, driven by messages as a worker drives it."""

from __future__ import annotations

import time
from typing import Literal

from kvrelay.bench.engine import BATCHES, CONTEXT, PREFILL_TOKENS, STEPS, WARM_STEPS
from kvrelay.checkpoint.fetch import resolve
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.ids import RequestId, new_request_id, new_worker_id
from kvrelay.progress import Progress
from kvrelay.runner.build import build_runner
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.serving import Failure, StepOutputs, Submit, of_kind

_BLOCK_SIZE = 16


class EngineSubject:
    """Times whole calls of `Engine.step`."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self._engine = engine
        self._prompts = prompts

    def decode(self, batch: int, steps: int) -> list[float]:
        requests = [self._submit(prompt, max_tokens=PREFILL_TOKENS) for prompt in self._prompts[:batch]]
        answered: set[RequestId] = set()
        while len(answered) < batch:
            answered.update(output.request_id for output in self._step().outputs)
        times = [self._timed_step(batch) for _ in range(WARM_STEPS + steps)]
        self._engine.abort(requests)
        self._run_dry()
        return times[WARM_STEPS:]

    def prefill(self, prompt: list[int]) -> float:
        self._submit(prompt, max_tokens=1)
        seconds = self._timed_step(1)
        self._run_dry()
        return seconds

    def close(self) -> None:
        self._engine.close()

    def _submit(self, prompt: list[int], max_tokens: int) -> RequestId:
        request_id = new_request_id()
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        self._engine.submit(Submit(request_id=request_id, external_id=request_id, prompt=prompt, params=params))
        return request_id

    def _timed_step(self, expected: int) -> float:
        start = time.perf_counter()
        outputs = self._step().outputs
        seconds = time.perf_counter() - start
        if len(outputs) != expected:
            raise BenchError(f"a step of {expected} sequences gave {len(outputs)} tokens")
        return seconds

    def _step(self) -> StepOutputs:
        step = self._engine.step()
        for failure in of_kind(Failure, step.news):
            raise BenchError(f"the engine refused a request: {failure.message}")
        return step

    def _run_dry(self) -> None:
        while self._engine.has_work:
            self._engine.step()


def build_subject(
    model: str, load: Literal["auto", "dummy"], threads: int, prompts: list[list[int]], progress: Progress
) -> tuple[ModelSpec, EngineSubject]:
    environment = read_environment()
    model_options = ModelOptions(model=model, load=load, threads=threads, dtype="float32")
    engine_options = EngineOptions(
        block_size=_BLOCK_SIZE,
        kv_blocks=num_blocks_needed(),
        max_batch=max(BATCHES),
        token_budget=PREFILL_TOKENS,
        max_model_len=2 * PREFILL_TOKENS,
    )
    folder = resolve(model, environment, progress)
    runner = build_runner(model_options, engine_options, folder, environment, progress)
    engine = Engine(
        options=engine_options,
        runner=runner,
        worker_id=new_worker_id(Role.WHOLE),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
    )
    return runner.spec, EngineSubject(engine, prompts)


def num_blocks_needed() -> int:
    """Room for the widest batch, its cached prompts included, and a long prompt beside it: nothing is ever preempted."""
    longest = CONTEXT + 1 + WARM_STEPS + max(STEPS.values()) + 1
    return max(BATCHES) * -(-longest // _BLOCK_SIZE) + 4 * PREFILL_TOKENS // _BLOCK_SIZE
