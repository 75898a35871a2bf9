"""Makes the features of images: their files are decoded, cut into patches and sent through the tower, those of one call
together, and put into the store. An image whose features are there costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import PIL.Image
import torch

from kvrelay.errors import MediaError
from kvrelay.media.image_spec import ImageSpec
from kvrelay.media.patches import patches_of
from kvrelay.models.vision import VisionTower
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.wire.serving import Image

Decode = Callable[[bytes], PIL.Image.Image]
"""From a file's bytes to an RGB image; raises MediaError."""


class Encoder:
    """One thread calls it."""

    def __init__(
        self,
        tower: VisionTower,
        spec: ImageSpec,
        store: FeatureStore,
        *,
        decode: Decode,
        device: torch.device,
        max_patches: int = 1 << 15,
    ) -> None:
        """`max_patches`: images are sent through the tower together up to so many patches, or alone."""
        self._tower = tower
        self._spec = spec
        self.store = store
        self._decode = decode
        self._device = device
        self._max_patches = max_patches
        self.num_encoded = 0  # images that went through the tower
        self.num_hits = 0  # images that did not need to
        self.num_passes = 0

    def encode(self, images: Sequence[Image]) -> dict[str, MediaError]:
        """Until this returns, the features of each image are in the store (as far as it keeps what is not held). Images
        that cannot be read are told by digest; the others are whole."""
        failures: dict[str, MediaError] = {}
        wanted: dict[str, Image] = {}
        for image in images:
            if image.digest in wanted or self.store.is_ready(image.digest):
                self.num_hits += 1
            else:
                wanted[image.digest] = image
        batch: list[tuple[Image, torch.Tensor]] = []
        for image in wanted.values():
            try:
                patches = self._patches(image)
            except MediaError as error:
                failures[image.digest] = error
                continue
            if batch and sum(part.shape[0] for _, part in batch) + patches.shape[0] > self._max_patches:
                self._run(batch)
                batch = []
            batch.append((image, patches))
        if batch:
            self._run(batch)
        return failures

    def _patches(self, image: Image) -> torch.Tensor:
        frames, num_rows, num_columns = image.grid
        num_tokens = num_rows * num_columns // self._spec.merge_size**2
        if frames != 1 or num_rows % self._spec.merge_size or num_columns % self._spec.merge_size or num_tokens < 1:
            raise MediaError(f"an image cannot have a grid of {image.grid} patches")
        if image.num_tokens != num_tokens:
            raise MediaError(f"a grid of {image.grid} patches makes {num_tokens} tokens, not {image.num_tokens}")
        size = self._spec.patch_size
        patches, _ = patches_of(self._decode(image.data), num_rows * size, num_columns * size, self._spec)
        return torch.from_numpy(patches)

    def _run(self, batch: list[tuple[Image, torch.Tensor]]) -> None:
        patches = torch.cat([part for _, part in batch]).to(self._device)
        features = self._tower.forward(patches, [image.grid for image, _ in batch])
        first = 0
        for image, _ in batch:
            own = features[first : first + image.num_tokens].clone()  # a view would keep the whole batch's features alive
            self.store.put(image.digest, own)
            first += image.num_tokens
        self.num_passes += 1
        self.num_encoded += len(batch)
