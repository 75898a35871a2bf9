"""Requests to an engine of this process."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.bench.harness.engine import step
from kvrelay.engine.engine import Engine
from kvrelay.ids import RequestId, new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Submit


def submit(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[RequestId]:
    request_ids = [new_request_id() for _ in prompts]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        engine.submit(Submit(request_id=request_id, external_id=request_id, prompt=prompt, params=params))
    return request_ids


def greedily(max_tokens: int) -> SamplingParams:
    """Past every end-of-text token."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def generate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """The outputs of all prompts, submitted at once."""
    outputs: dict[RequestId, list[int]] = {request_id: [] for request_id in submit(engine, prompts, params)}
    while engine.serves:
        for output in step(engine).outputs:
            outputs[output.request_id] += output.tokens
    return list(outputs.values())
