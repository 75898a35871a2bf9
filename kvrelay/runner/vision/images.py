"""The images of a step: where their tokens are in the batch, their positions on three axes, and their features.

Along a prompt, a token of text has one position p on all axes, and the next one p + 1. An image of h x w tokens that begins at
p gives its tokens (p, p + row, p + column); what follows it goes on at p + max(h, w). So behind an image every position is
less than the token's index, by an amount that stays the same to the end of the sequence:

    index      0 1 2 | 3 4 5 6 7 8 | 9 10       an image of 2 x 3 tokens
    time       0 1 2 | 3 3 3 3 3 3 | 6 7
    height     0 1 2 | 3 3 3 4 4 4 | 6 7
    width      0 1 2 | 3 4 5 3 4 5 | 6 7
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.checkpoint.vision_spec import VisionSpec
from kvrelay.engine.interfaces import Row
from kvrelay.kernels.base import ImageBatch
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.wire.serving import Image


@dataclass(frozen=True, slots=True)
class Span:
    """One image in a sequence: its tokens start .. stop, and the position its first row and column have."""

    digest: str
    start: int
    stop: int
    position: int
    num_columns: int
    shift: int  # what positions behind it differ from indexes by


def spans_of(images: Iterable[Image], merge_size: int) -> list[Span]:
    """Of the images of one prompt, in order."""
    spans, shift = [], 0
    for image in images:
        frames, num_rows, num_columns = image.grid[0], image.grid[1] // merge_size, image.grid[2] // merge_size
        assert frames == 1, "an image has one frame"
        assert image.num_tokens == num_rows * num_columns, f"{image.num_tokens} tokens for {num_rows} x {num_columns}"
        position = image.start + shift
        shift += max(num_rows, num_columns) - image.num_tokens
        stop = image.start + image.num_tokens
        spans.append(Span(image.digest, image.start, stop, position, num_columns, shift))
    return spans


@dataclass(frozen=True, slots=True)
class _Piece:
    """An image's tokens in a batch: its tokens `first` .. `first + count` are at `place` and after."""

    span: Span
    first: int
    count: int
    place: int


class ImageRows:
    """Remembers the spans of live sequences, which do not change."""

    def __init__(self, spec: VisionSpec, store: FeatureStore, device: torch.device) -> None:
        self._spec = spec
        self._store = store
        self._device = device
        self._spans: dict[int, list[Span]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._spans.pop(key, None)

    def fill(
        self, rows: list[Row], row_starts: NDArray[Any], token_ids: NDArray[Any], positions: NDArray[Any]
    ) -> ImageBatch | None:
        """Turns indexes in `positions` into positions in time, and placeholders in `token_ids` into a token that exists. None:
        the batch has no token of an image, so all axes are alike."""
        pieces: list[_Piece] = []
        for row, place in zip(rows, row_starts.tolist(), strict=False):
            if row.sequence.images:
                self._fill_row(row, place, positions, pieces)
        if not pieces:
            return None
        axes = np.tile(positions, (3, 1))
        for piece in pieces:
            here = slice(piece.place, piece.place + piece.count)
            down, right = np.divmod(np.arange(piece.first, piece.first + piece.count), piece.span.num_columns)
            axes[1, here] += down
            axes[2, here] += right
            token_ids[here] = self._spec.image_token_id
        places = np.concatenate([np.arange(piece.place, piece.place + piece.count) for piece in pieces])
        features = [self._store.get(piece.span.digest)[piece.first : piece.first + piece.count] for piece in pieces]
        return ImageBatch(
            axes=torch.from_numpy(axes).to(self._device),
            places=torch.from_numpy(places).to(self._device),
            features=torch.cat(features),
            num_deepstack=self._spec.num_deepstack,
        )

    def _fill_row(self, row: Row, place: int, positions: NDArray[Any], pieces: list[_Piece]) -> None:
        spans = self._spans.get(row.sequence.key)
        if spans is None:
            spans = self._spans[row.sequence.key] = spans_of(row.sequence.images, self._spec.merge_size)
        end = row.start + row.count
        if row.start >= spans[-1].stop:  # decoding, most often
            positions[place : place + row.count] += spans[-1].shift
            return
        for index, span in enumerate(spans):
            first, last = max(row.start, span.start), min(end, span.stop)
            if first < last:
                begin = place + first - row.start
                positions[begin : begin + last - first] = span.position
                pieces.append(_Piece(span, first - span.start, last - first, begin))
            until = min(end, spans[index + 1].start if index + 1 < len(spans) else end)
            behind = max(row.start, span.stop)
            if behind < until:
                positions[place + behind - row.start : place + until - row.start] += span.shift
