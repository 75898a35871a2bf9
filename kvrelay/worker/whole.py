"""A worker that does everything for a request: joins the engine and its runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvrelay.config import EngineOptions, Environment, ModelOptions, TransferOptions
from kvrelay.engine.engine import Engine
from kvrelay.engine.requests.local_encoder import LocalEncoder
from kvrelay.errors import ConfigError
from kvrelay.ids import new_worker_id
from kvrelay.media.image_spec import read_image_spec
from kvrelay.progress import Progress
from kvrelay.runner.build import build_runner
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.transfer.region import shared_region
from kvrelay.worker.images import Reach, open_images, relay_parts
from kvrelay.worker.stage import BuildStage, Setup, Stage, Waker, publishes_events

if TYPE_CHECKING:  # it loads Pillow
    from kvrelay.runner.vision.encoder import Encoder


def whole_stage(options: TransferOptions, host: str) -> BuildStage:
    """How to build a whole worker that encode workers can reach: it takes their embeddings over from `host`."""
    return lambda setup: _join(setup, Reach(options, host, Waker()))[1]


def build_engine(
    model_options: ModelOptions, engine_options: EngineOptions, environment: Environment, progress: Progress
) -> tuple[Tokenizer, Engine]:
    """The same without a process around it, with the tokenizer that a router would hold."""
    if engine_options.engine != "kvrelay":
        raise ConfigError(f"engine={engine_options.engine!r} runs in worker processes: give whole=1, or prefill and decode")
    unheard = msgspec.structs.replace(
        engine_options.for_device(model_options.device), kv_events=False
    )  # no router follows them
    setup = Setup(new_worker_id("whole"), model_options, unheard, environment, progress)
    return Tokenizer.load(setup.folder), _join(setup)[0]


def _join(setup: Setup, reach: Reach | None = None) -> tuple[Engine, Stage]:
    tower = _open_tower(setup)
    embeddings = None if reach is None else relay_parts(setup, reach)
    runner = build_runner(
        setup.model,
        setup.engine,
        setup.folder,
        setup.environment,
        setup.progress,
        shared_region if setup.model.tp > 1 else None,
        features=None if tower is None else tower.store,
        on_rank_death=setup.on_rank_death,
    )
    engine = Engine(
        options=setup.engine,
        runner=runner,
        worker_id=setup.worker_id,
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
        images=open_images(setup, runner, parts=embeddings, encoder=None if tower is None else LocalEncoder(tower)),
        adapters=runner.adapters,
    )
    stage = Stage(
        engine=engine,
        fingerprint=runner.fingerprint,
        max_model_len=runner.max_model_len,
        recorder=engine.kv.record_events() if publishes_events(setup.engine) else None,
        waker=Waker() if reach is None else reach.waker,
        adapters=runner.adapters,
    )
    return engine, stage


def _open_tower(setup: Setup) -> Encoder | None:
    """None for a text model, whose worker loads none of this."""
    if read_image_spec(setup.folder) is None:
        return None
    from kvrelay.worker.encode_stage import tower_of

    return tower_of(setup)
