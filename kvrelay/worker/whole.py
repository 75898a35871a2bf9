"""A worker that does everything for a request: joins the engine and its runner."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import msgspec

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import EngineOptions, Environment, ModelOptions, TransferOptions
from kvrelay.engine.engine import Engine
from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.media.image_spec import read_image_spec
from kvrelay.progress import Progress
from kvrelay.runner.build import build_runner
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.worker.images import Reach, open_images
from kvrelay.worker.stage import BuildStage, Stage, Waker, publishes_events

if TYPE_CHECKING:  # it loads Pillow
    from kvrelay.worker.local_encoder import LocalEncoder


def whole_stage(options: TransferOptions, host: str) -> BuildStage:
    """How to build a whole worker that encode workers can reach: it takes their embeddings over from `host`."""

    def build(
        worker_id: WorkerId,
        model_options: ModelOptions,
        engine_options: EngineOptions,
        environment: Environment,
        progress: Progress,
    ) -> Stage:
        folder = resolve(model_options.model, environment, progress)
        reach = Reach(options, host, Waker())
        return _join(worker_id, model_options, engine_options, environment, progress, folder, reach)[1]

    return build


def build_whole(
    worker_id: WorkerId,
    model_options: ModelOptions,
    engine_options: EngineOptions,
    environment: Environment,
    progress: Progress,
) -> Stage:
    """One that needs no other worker."""
    folder = resolve(model_options.model, environment, progress)
    return _join(worker_id, model_options, engine_options, environment, progress, folder)[1]


def build_engine(
    model_options: ModelOptions, engine_options: EngineOptions, environment: Environment, progress: Progress
) -> tuple[Tokenizer, Engine]:
    """The same without a process around it, with the tokenizer that a router would hold."""
    folder = resolve(model_options.model, environment, progress)
    tokenizer = Tokenizer.load(folder)
    chosen = engine_options.for_device(model_options.device)
    unheard = msgspec.structs.replace(chosen, kv_events=False)  # no router follows them
    engine, _ = _join(new_worker_id("whole"), model_options, unheard, environment, progress, folder)
    return tokenizer, engine


def _join(
    worker_id: WorkerId,
    model_options: ModelOptions,
    engine_options: EngineOptions,
    environment: Environment,
    progress: Progress,
    folder: pathlib.Path,
    reach: Reach | None = None,
) -> tuple[Engine, Stage]:
    encoder = _open_encoder(model_options, engine_options, folder, progress)
    runner = build_runner(
        model_options,
        engine_options,
        folder,
        environment,
        progress,
        features=None if encoder is None else encoder.store,
    )
    engine = Engine(
        options=engine_options,
        runner=runner,
        worker_id=worker_id,
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
        images=open_images(worker_id, model_options, engine_options, folder, runner, reach=reach, encoder=encoder),
    )
    stage = Stage(
        engine=engine,
        fingerprint=runner.fingerprint,
        max_model_len=runner.max_model_len,
        recorder=engine.kv.record_events() if publishes_events(engine_options) else None,
        waker=Waker() if reach is None else reach.waker,
    )
    return engine, stage


def _open_encoder(
    model_options: ModelOptions, engine_options: EngineOptions, folder: pathlib.Path, progress: Progress
) -> LocalEncoder | None:
    """None for a text model, whose worker loads none of this."""
    if read_image_spec(folder) is None:
        return None
    from kvrelay.worker.encode_stage import tower_of
    from kvrelay.worker.local_encoder import LocalEncoder

    return LocalEncoder(tower_of(model_options, engine_options, folder, progress))
