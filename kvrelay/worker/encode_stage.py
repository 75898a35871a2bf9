"""Encode workers and whole workers: those with a vision tower. Not in `images.py`, so that the others do not load Pillow."""

from __future__ import annotations

import functools
import pathlib

import zmq

from kvrelay.checkpoint.fetch import resolve
from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import EngineOptions, Environment, ModelOptions, TransferOptions
from kvrelay.errors import ConfigError
from kvrelay.ids import WorkerId
from kvrelay.media.decode import Limits, decode
from kvrelay.media.image_spec import read_image_spec
from kvrelay.progress import Progress
from kvrelay.runner.build import model_fingerprint
from kvrelay.runner.vision.build import build_encoder
from kvrelay.runner.vision.encoder import Encoder
from kvrelay.transfer.embedding.mover import EmbeddingParts, EmbeddingProducer
from kvrelay.worker.encode import EncodeEngine
from kvrelay.worker.images import Reach, relay_parts
from kvrelay.worker.stage import BuildStage, Stage, Waker

_NO_LIMIT = Limits(max_bytes=1 << 40, max_pixels=1 << 40)  # the router has looked


def encode_stage(options: TransferOptions, host: str, signal_port: int = 0) -> BuildStage:
    """How to build an encode worker that listens on `host`. Port 0 is any free one."""

    def build(
        worker_id: WorkerId,
        model_options: ModelOptions,
        engine_options: EngineOptions,
        environment: Environment,
        progress: Progress,
    ) -> Stage:
        folder = resolve(model_options.model, environment, progress)
        spec, image_spec = read_spec(folder), read_image_spec(folder)
        if image_spec is None:
            raise ConfigError(f"--role encode: {model_options.model} is a text model and takes no images")
        encoder = tower_of(model_options, engine_options, folder, progress)
        fingerprint = model_fingerprint(spec, model_options, folder)
        reach = Reach(options, host, Waker())
        producer = _producer(relay_parts(worker_id, image_spec, model_options, fingerprint, reach), host, signal_port)
        engine = EncodeEngine(
            worker_id=worker_id,
            encoder=encoder,
            producer=producer,
            merge_size=image_spec.merge_size,
            max_queue=engine_options.max_queue,
        )
        return Stage(
            engine=engine,
            fingerprint=fingerprint,
            max_model_len=engine_options.max_model_len or spec.max_position_embeddings,
            signal_address=producer.signal_address,
            waker=reach.waker,
        )

    return build


def tower_of(model_options: ModelOptions, engine_options: EngineOptions, folder: pathlib.Path, progress: Progress) -> Encoder:
    return build_encoder(model_options, engine_options, folder, functools.partial(decode, limits=_NO_LIMIT), progress)


def _producer(parts: EmbeddingParts, host: str, port: int) -> EmbeddingProducer:
    try:
        return EmbeddingProducer(parts, listen_host=host, listen_port=port)
    except zmq.ZMQError as error:
        reason = error.strerror or error
        raise ConfigError(f"the signal plane cannot listen on {host}:{port} (--signal-port): {reason}") from error
