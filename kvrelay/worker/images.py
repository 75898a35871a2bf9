"""What a worker that computes prompts needs for their images. One whose model takes none has nothing of this."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import TransferOptions
from kvrelay.engine.fence import PASSED, Fence
from kvrelay.engine.requests.images import Images, ImageSource
from kvrelay.media.image_spec import read_image_spec
from kvrelay.runner.choices import DTYPES, choose_dtype, cpu_flags, model_fingerprint, open_device
from kvrelay.runner.cuda_fence import CudaFence
from kvrelay.runner.gpu_memory import explained
from kvrelay.runner.runner import TorchRunner
from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.memory import card_memory, host_memory
from kvrelay.transfer.embedding.mover import EmbeddingConsumer, EmbeddingParts
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.worker.embedding import embedding_layout, embedding_parts
from kvrelay.worker.embedding_intake import EmbeddingIntake
from kvrelay.worker.stage import Setup, Waker
from kvrelay.worker.transports import open_embedding_engines


@dataclass(frozen=True, slots=True)
class Reach:
    """How a worker exchanges embeddings with others: by which transports, at which address, and who is told of news. `on_card`:
    its pool is on its card, if it has one. Else it is on the host alone, where room that is not used costs nothing."""

    options: TransferOptions
    host: str
    waker: Waker
    on_card: bool = False


def open_images(
    setup: Setup, runner: TorchRunner, *, parts: EmbeddingParts | None, encoder: ImageSource | None = None
) -> Images | None:
    """None if the model takes no images. Without `parts`, embeddings come from the encoder alone."""
    store, image_spec = runner.features, read_image_spec(setup.folder)
    if store is None or image_spec is None:
        return None
    sources: list[ImageSource] = []
    if parts is not None:
        dtype = DTYPES[choose_dtype(setup.model, cpu_flags())]
        sources.append(EmbeddingIntake(EmbeddingConsumer(parts), store, dtype, image_spec.merge_size))
    if encoder is not None:
        sources.append(encoder)
    return Images(store, sources, timeout_s=setup.engine.embedding_timeout_s, clock=time.monotonic)


def relay_parts(setup: Setup, reach: Reach) -> EmbeddingParts | None:
    """None if the model takes no images. A runner in the same process is built afterwards, so that it knows what memory of the
    card the pool has left."""
    image_spec = read_image_spec(setup.folder)
    if image_spec is None:
        return None
    dtype_name = choose_dtype(setup.model, cpu_flags())
    layout = embedding_layout(
        reach.options,
        hidden=image_spec.hidden_size,
        deepstack=image_spec.num_deepstack,
        dtype=dtype_name,
        item_bytes=DTYPES[dtype_name].itemsize,
    )
    device = open_device(setup.model) if reach.on_card else torch.device("cpu")
    pool, engines = open_pool(setup, reach, layout, device)
    fingerprint = model_fingerprint(read_spec(setup.folder), setup.model, setup.folder)
    return embedding_parts(
        setup.worker_id, pool, engines, fingerprint, reach.options, _fences_on(device), on_news=reach.waker
    )  # fmt: skip


def open_pool(
    setup: Setup, reach: Reach, layout: EmbeddingLayout, device: torch.device
) -> tuple[EmbeddingPool, list[TransferEngine]]:
    """With the transports that reach it. On a card if one of them can move memory there."""
    name = reach.options.transfer
    on_card, on_host = open_embedding_engines(name, setup.worker_id, reach.host, str(device))
    card = None
    if on_card:
        room = f"making room for {layout.num_tokens} tokens of embeddings (--embedding-pool-tokens)"
        with explained(room, layout.size_bytes, device):
            card = card_memory(layout, device)
    return EmbeddingPool(host_memory(layout), card, [engine.name for engine in on_card]), [*on_card, *on_host]


def _fences_on(device: torch.device) -> Callable[[], Fence]:
    return functools.partial(CudaFence, device) if device.type == "cuda" else lambda: PASSED
