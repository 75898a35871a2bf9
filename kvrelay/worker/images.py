"""What a worker that computes prompts needs for their images. One whose model takes none has nothing of this."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvrelay.config import TransferOptions
from kvrelay.engine.requests.images import Images, ImageSource
from kvrelay.media.image_spec import ImageSpec, read_image_spec
from kvrelay.runner.choices import DTYPES, choose_dtype, cpu_flags
from kvrelay.runner.runner import TorchRunner
from kvrelay.transfer.embedding.mover import EmbeddingConsumer, EmbeddingParts
from kvrelay.worker.embedding import embedding_layout, embedding_parts
from kvrelay.worker.embedding_intake import EmbeddingIntake
from kvrelay.worker.stage import Setup, Waker
from kvrelay.worker.transports import open_engines


@dataclass(frozen=True, slots=True)
class Reach:
    """How a worker exchanges embeddings with others: by which transports, at which address, and who is told of news."""

    options: TransferOptions
    host: str
    waker: Waker


def open_images(setup: Setup, runner: TorchRunner, *, reach: Reach | None, encoder: ImageSource | None = None) -> Images | None:
    """None if the model takes no images. Without `reach`, embeddings come from the encoder alone."""
    store, image_spec = runner.features, read_image_spec(setup.folder)
    if store is None or image_spec is None:
        return None
    relay = None
    if reach is not None:
        consumer = EmbeddingConsumer(relay_parts(setup, image_spec, runner.fingerprint, reach))
        relay = EmbeddingIntake(consumer, store, DTYPES[choose_dtype(setup.model, cpu_flags())], image_spec.merge_size)
    return Images(store, relay=relay, encoder=encoder, timeout_s=setup.engine.embedding_timeout_s, clock=time.monotonic)


def relay_parts(setup: Setup, image_spec: ImageSpec, fingerprint: str, reach: Reach) -> EmbeddingParts:
    """The pool is in the host's memory, whatever the device."""
    dtype_name = choose_dtype(setup.model, cpu_flags())
    layout = embedding_layout(
        reach.options,
        hidden=image_spec.hidden_size,
        deepstack=image_spec.num_deepstack,
        dtype=dtype_name,
        item_bytes=DTYPES[dtype_name].itemsize,
    )
    name = "auto" if reach.options.transfer == "cuda_ipc" else reach.options.transfer
    engines = open_engines(name, setup.worker_id, reach.host, "cpu")
    return embedding_parts(setup.worker_id, layout, engines, fingerprint, reach.options, reach.waker)
