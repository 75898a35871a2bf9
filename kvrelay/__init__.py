"""kvrelay serves language models with encode, prefill and decode on separate workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.offline.llm import LLM as LLM
    from kvrelay.offline.llm import AsyncLLM as AsyncLLM
    from kvrelay.sampling import BeamSearch as BeamSearch
    from kvrelay.sampling import SamplingParams as SamplingParams

__all__ = ["LLM", "AsyncLLM", "BeamSearch", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Loads PyTorch only for those who ask for a model in this process."""
    if name in ("LLM", "AsyncLLM"):
        import kvrelay.offline.llm

        return {"LLM": kvrelay.offline.llm.LLM, "AsyncLLM": kvrelay.offline.llm.AsyncLLM}[name]
    if name in ("BeamSearch", "SamplingParams"):
        import kvrelay.sampling

        return {"BeamSearch": kvrelay.sampling.BeamSearch, "SamplingParams": kvrelay.sampling.SamplingParams}[name]
    raise AttributeError(f"module 'kvrelay' has no attribute {name!r}")
