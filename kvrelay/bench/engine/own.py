"""Our engine as a benchmark's subject: built as a worker builds it, driven by messages as a worker drives it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvrelay.bench.engine.work import BATCHES, CONTEXT, PREFILL_TOKENS, PREFILLS, STEPS, WARM_STEPS
from kvrelay.bench.harness.engine import build_engine, run_dry, step
from kvrelay.bench.harness.workload import submission
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.ids import RequestId
from kvrelay.launch.console import console_progress

_BLOCK_SIZE = 16


class EngineSubject:
    """Times whole calls of `Engine.step`."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self._engine = engine
        self._prompts = prompts

    def adapters(self) -> list[str]:
        """The digests of the LoRA adapters that there are."""
        return [adapter.digest for adapter in self._engine.core.limits.adapters.records()]

    def read_adapter(self, path: str) -> None:
        self._engine.core.limits.adapters.read(path)

    def decode(self, batch: int, steps: int, adapters: Sequence[str] = ()) -> list[float]:
        """`adapters`, if there are any: one a sequence."""
        chosen = zip(self._prompts[:batch], adapters or [""] * batch, strict=True)
        requests = [self._submit(prompt, max_tokens=PREFILL_TOKENS, adapter=adapter) for prompt, adapter in chosen]
        answered: set[RequestId] = set()
        while len(answered) < batch:
            answered.update(output.request_id for output in step(self._engine).outputs)
        times = [self._timed_step(batch) for _ in range(WARM_STEPS + steps)]
        self._engine.abort(requests)
        run_dry(self._engine)
        return times[WARM_STEPS:]

    def prefill(self, prompt: list[int]) -> float:
        self._submit(prompt, max_tokens=1)
        seconds = self._timed_step(1)
        run_dry(self._engine)
        return seconds

    def close(self) -> None:
        self._engine.close()

    def _submit(self, prompt: list[int], max_tokens: int, adapter: str = "") -> RequestId:
        submit = msgspec.structs.replace(submission(prompt, max_tokens), adapter=adapter)
        self._engine.submit(submit)
        return submit.request_id

    def _timed_step(self, expected: int) -> float:
        start = time.perf_counter()
        outputs = step(self._engine).outputs
        seconds = time.perf_counter() - start
        if len(outputs) != expected:
            raise BenchError(f"a step of {expected} sequences gave {len(outputs)} tokens")
        return seconds


def build_subject(model: ModelOptions, prompts: list[list[int]]) -> tuple[ModelSpec, EngineSubject]:
    """The pool has room for the widest batch, its cached prompts and a long prompt beside it: nothing is ever preempted."""
    longest = CONTEXT + 1 + WARM_STEPS + max(STEPS.values()) + 1
    options = EngineOptions(
        block_size=_BLOCK_SIZE,
        kv_blocks=max(BATCHES) * -(-longest // _BLOCK_SIZE) + 2 * PREFILLS[-1] // _BLOCK_SIZE,
        max_batch=max(BATCHES),
        token_budget=PREFILLS[-1],
        max_model_len=2 * PREFILLS[-1],
    )
    engine, runner = build_engine(model, options, console_progress())
    return runner.spec, EngineSubject(engine, prompts)
