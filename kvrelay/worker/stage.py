"""What a role brings into the worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.config import EngineOptions, Environment, ModelOptions
from kvrelay.ids import WorkerId
from kvrelay.progress import Progress
from kvrelay.worker.serving import ServingEngine


@dataclass(frozen=True, slots=True)
class Stage:
    engine: ServingEngine
    fingerprint: str  # equal for workers that can replace each other
    max_model_len: int


BuildStage = Callable[[WorkerId, ModelOptions, EngineOptions, Environment, Progress], Stage]
