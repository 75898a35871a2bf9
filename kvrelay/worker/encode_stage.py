"""Encode workers and whole workers: those with a vision tower. Not in `images.py`, so that the others do not load Pillow."""

from __future__ import annotations

import functools

from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import TransferOptions
from kvrelay.engine.encode import EncodeEngine
from kvrelay.errors import ConfigError
from kvrelay.ids import TransferId
from kvrelay.media.decode import Limits, decode
from kvrelay.media.image_spec import read_image_spec
from kvrelay.runner.vision.build import build_encoder
from kvrelay.runner.vision.encoder import Encoder
from kvrelay.runner.vision.feature_rows import to_rows
from kvrelay.transfer.embedding.mover import EmbeddingProducer
from kvrelay.transfer.embedding.pieces import Embedding
from kvrelay.wire.serving import Image
from kvrelay.worker.embedding import describe
from kvrelay.worker.images import Reach, relay_parts
from kvrelay.worker.stage import BuildStage, Setup, Stage, Waker
from kvrelay.worker.transports import signal_port

_NO_LIMIT = Limits(max_bytes=1 << 40, max_pixels=1 << 40)  # the router has looked


def encode_stage(options: TransferOptions, host: str, port: int = 0) -> BuildStage:
    """How to build an encode worker that listens on `host`. Signal port 0 is any free one."""

    def build(setup: Setup) -> Stage:
        spec, image_spec = read_spec(setup.folder), read_image_spec(setup.folder)
        if image_spec is None:
            raise ConfigError(f"--role encode: {setup.model.model} is a text model and takes no images")
        encoder = tower_of(setup)
        reach = Reach(options, host, Waker(), on_card=True)
        parts = relay_parts(setup, reach)
        assert parts is not None
        with signal_port(host, port):
            producer = EmbeddingProducer(parts, listen_host=host, listen_port=port)

        merge_size = image_spec.merge_size

        def offer(transfer_id: TransferId, image: Image) -> bool:
            fill_ids, positions, aux = describe(image, merge_size)
            rows = to_rows(encoder.store.get(image.digest))
            return producer.offer(transfer_id, Embedding(rows=rows, fill_ids=fill_ids, positions=positions, aux=aux))

        engine = EncodeEngine(
            worker_id=setup.worker_id,
            encoder=encoder,
            producer=producer,
            offer=offer,
            max_queue=setup.engine.max_queue,
        )
        return Stage(
            engine=engine,
            fingerprint=parts.fingerprint,
            max_model_len=setup.engine.max_model_len or spec.max_position_embeddings,
            signal_address=producer.signal_address,
            waker=reach.waker,
        )

    return build


def tower_of(setup: Setup) -> Encoder:
    unlimited = functools.partial(decode, limits=_NO_LIMIT)
    return build_encoder(setup.model, setup.engine, setup.folder, unlimited, setup.progress)
