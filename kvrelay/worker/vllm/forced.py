"""What vLLM's first model runner lacks (the second does not need this). vLLM imports this file in each process that runs a part
of the model, since it is named as its workers' extension.

Output that another worker made, where the runner keeps a sequence's output: penalties and the like look at it. vLLM's scheduler
takes a sequence that has output already; the runner begins every sequence without any.

Room for what a pipeline stage is given by the one before it. The runner makes it when it warms up, which it does not do on a
CPU with `enforce_eager`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_model_runner

FORCED = "kvrelay_forced"  # in the extra arguments of sampling parameters, which travel with a sequence

_Cached = gpu_model_runner.CachedRequestState


class _Begun(_Cached):  # type: ignore[misc, valid-type]
    def __post_init__(self) -> None:
        super().__post_init__()
        extra = None if self.sampling_params is None else self.sampling_params.extra_args
        self.output_token_ids.extend((extra or {}).get(FORCED, ()))


gpu_model_runner.CachedRequestState = _Begun


_gather = gpu_model_runner.GPUModelRunner.sync_and_gather_intermediate_tensors


def _gather_in_room(runner: Any, *arguments: Any) -> Any:
    if runner.intermediate_tensors is None:
        make = runner.model.make_empty_intermediate_tensors
        runner.intermediate_tensors = make(runner.max_num_tokens, runner.model_config.dtype, runner.device)
    return _gather(runner, *arguments)


gpu_model_runner.GPUModelRunner.sync_and_gather_intermediate_tensors = _gather_in_room


class ForcedOutput:
    """Adds nothing to vLLM's worker but the import of this file."""
