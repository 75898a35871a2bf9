"""What a worker needs to take part in the embedding relay, from its options: the shape of its pool, the settings; and what both
sides know of an image besides its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.config import TransferOptions
from kvrelay.engine.fence import PASSED, Fence
from kvrelay.ids import WorkerId
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.mover import EmbeddingParts
from kvrelay.transfer.embedding.pieces import Ints
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.embedding.room import EmbeddingSettings
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.wire.serving import Image

_AUX_ITEMS = 256  # the number of tokens, and what encode and prefill workers tell each other of up to 80 images


class Description(NamedTuple):
    """What an embedding must be like to be that of an image. The encode worker sends it beside the features, the receiver
    compares it with its own: so features that belong to another image, or are cut otherwise, are not used."""

    fill_ids: Ints  # [tokens]
    positions: Ints  # [tokens, 3]: time, height, width within the image
    aux: tuple[int, ...]  # the grid

    def mismatch(self, fill_ids: Ints, positions: Ints, aux: tuple[int, ...]) -> str:
        """Why something else came; empty if it did not."""
        if not np.array_equal(fill_ids, self.fill_ids):
            return "what came is another image"
        if not np.array_equal(positions, self.positions):
            return "what came has other positions"
        told = aux[: len(self.aux)]
        return "" if told == self.aux else f"what came has a grid of {told} patches, not of {self.aux}"


def describe(image: Image, merge_size: int) -> Description:
    down, right = np.divmod(np.arange(image.num_tokens, dtype=np.int32), image.grid[2] // merge_size)
    positions = np.stack((np.zeros_like(down), down, right), axis=1).astype(np.int32)
    return Description(np.array(placeholder_ids(image.digest, image.num_tokens), dtype=np.int32), positions, image.grid)


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
    pool: EmbeddingPool,
    engines: Sequence[TransferEngine],
    fingerprint: str,
    options: TransferOptions,
    fence: Callable[[], Fence] = lambda: PASSED,
    on_news: Callable[[], None] = lambda: None,
) -> EmbeddingParts:
    """For an `EmbeddingProducer` or `EmbeddingConsumer`. The engines must be its own: each serves one region."""
    settings = EmbeddingSettings(
        buffer_tokens=options.embedding_buffer_tokens,
        buffer=options.embedding_buffer,
        full=options.embedding_full,
        wait_s=options.embedding_wait_s,
        transfer=TransferSettings(lease_s=options.transfer_lease_s),
    )
    return EmbeddingParts(
        worker_id=worker_id,
        pool=pool,
        engines=engines,
        fingerprint=fingerprint,
        host=host_identity(),
        settings=settings,
        fence=fence,
        on_news=on_news,
    )
