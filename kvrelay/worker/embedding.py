"""What a worker needs to take part in the embedding relay, from its options: the pool, the memory under it, the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.config import TransferOptions
from kvrelay.ids import WorkerId
from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.mover import EmbeddingParts
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.embedding.room import EmbeddingSettings
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.region import shared_region
from kvrelay.transfer.relay.link import TransferSettings

_AUX_ITEMS = 256  # the number of tokens, and what encode and prefill workers tell each other of up to 80 images


def embedding_settings(options: TransferOptions) -> EmbeddingSettings:
    return EmbeddingSettings(
        buffer_tokens=options.embedding_buffer_tokens,
        buffer=options.embedding_buffer,
        full=options.embedding_full,
        wait_s=options.embedding_wait_s,
        transfer=TransferSettings(lease_s=options.transfer_lease_s),
    )


def embedding_layout(options: TransferOptions, *, hidden: int, deepstack: int, dtype: str, item_bytes: int) -> EmbeddingLayout:
    """The pool has at least the tokens that were asked for."""
    return EmbeddingLayout(
        num_blocks=-(-options.embedding_pool_tokens // options.embedding_block_size),
        block_size=options.embedding_block_size,
        hidden=hidden,
        deepstack=deepstack,
        dtype=dtype,
        item_bytes=item_bytes,
        aux_items=_AUX_ITEMS,
    )


def embedding_parts(
    worker_id: WorkerId,
    layout: EmbeddingLayout,
    engines: Sequence[TransferEngine],
    fingerprint: str,
    options: TransferOptions,
    on_news: Callable[[], None] = lambda: None,
) -> EmbeddingParts:
    """For an `EmbeddingProducer` or `EmbeddingConsumer`. The engines must be its own: each serves one region."""
    region = shared_region(layout.size_bytes, "kvrelay-embeddings")
    return EmbeddingParts(
        worker_id=worker_id,
        pool=EmbeddingPool(layout, region),
        region=region,
        engines=engines,
        fingerprint=fingerprint,
        host=host_identity(),
        settings=embedding_settings(options),
        on_news=on_news,
    )
