"""What a role brings into the worker process."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import EngineOptions, Environment, ModelOptions
from kvrelay.engine.interfaces import Adapters, NoAdapters
from kvrelay.engine.memory.events import EventRecorder
from kvrelay.ids import WorkerId
from kvrelay.progress import Progress
from kvrelay.worker.serving_engine import ServingEngine


class Waker:
    """Told by other threads that the engine has news; passes it on to the loop that drives the engine, once there is one."""

    def __init__(self) -> None:
        self._wake: Callable[[], None] | None = None

    def bind(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def __call__(self) -> None:
        if self._wake is not None:
            self._wake()


@dataclass(frozen=True, slots=True)
class Stage:
    engine: ServingEngine
    fingerprint: str  # equal for workers that can replace each other
    max_model_len: int
    signal_address: str = ""  # where a prefill worker's consumers connect
    recorder: EventRecorder | None = None  # what the engine's cache does, if routers are to be told
    waker: Waker = field(default_factory=Waker)
    adapters: Adapters = NoAdapters()  # LoRA adapters that requests may ask for
    block_size: int | None = None  # tokens per KV block, where that is the engine's choice; None: that of the options


@dataclass(frozen=True)
class Setup:
    """What a stage is built from."""

    worker_id: WorkerId
    model: ModelOptions
    engine: EngineOptions
    environment: Environment
    progress: Progress
    on_rank_death: Callable[[str], None] | None = None  # None: the next step raises RankDiedError

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """Of the model, which is fetched when it is first asked for."""
        return resolve(self.model.model, self.environment, self.progress)


BuildStage = Callable[[Setup], Stage]


def publishes_events(options: EngineOptions) -> bool:
    """Without a prefix cache there is nothing to tell."""
    return options.prefix_cache and options.kv_events
