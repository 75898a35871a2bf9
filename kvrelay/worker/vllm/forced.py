"""Output that another worker made, where vLLM's model runner keeps a sequence's output: penalties and the like look at it.

vLLM's scheduler takes a sequence that has output already; its first model runner (the second does not need this) begins every
sequence without any. vLLM imports this file in each process that runs a part of the model, since it is named as its workers'
extension.
"""

from __future__ import annotations

from vllm.v1.worker import gpu_model_runner

FORCED = "kvrelay_forced"  # in the extra arguments of sampling parameters, which travel with a sequence

_Cached = gpu_model_runner.CachedRequestState


class _Begun(_Cached):  # type: ignore[misc, valid-type]
    def __post_init__(self) -> None:
        super().__post_init__()
        extra = None if self.sampling_params is None else self.sampling_params.extra_args
        self.output_token_ids.extend((extra or {}).get(FORCED, ()))


gpu_model_runner.CachedRequestState = _Begun


class ForcedOutput:
    """Adds nothing to vLLM's worker but the import of this file."""
