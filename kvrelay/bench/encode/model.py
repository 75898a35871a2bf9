"""The options of `kvrelay bench encode`, its vision-language model, and prompts with images for it.

Without a checkpoint it has made-up weights: a vision tower large enough that an image costs some tenths of a second on two
cores, and a small text model, so that what is measured is the tower's share and not the prompt's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import PIL.Image
from msgspec import Meta

from kvrelay.bench.harness.scenario import BenchOptions
from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import ModelOptions, Positive, read_environment
from kvrelay.errors import BenchError
from kvrelay.media.image_spec import ImageSpec, read_image_spec
from kvrelay.media.patches import grid_of
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.media.resize import target_size
from kvrelay.progress import Silent
from kvrelay.wire.serving import Image

SIDE = 384  # of an image, in pixels
_CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
    "image_token_id": 262, "video_token_id": 263, "vision_start_token_id": 259, "vision_end_token_id": 260,
    "text_config": {
        "model_type": "qwen3_vl_text", "vocab_size": 264, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "bos_token_id": 256, "eos_token_id": 258, "hidden_act": "silu", "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 8, "hidden_size": 256, "intermediate_size": 1024, "out_hidden_size": 128,
        "num_heads": 4, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "num_position_embeddings": 48 * 48, "deepstack_visual_indexes": [1, 3, 5],
    },
}  # fmt: skip
_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 1 << 20},  # least and most pixels
}  # fmt: skip


class EncodeBench(BenchOptions, frozen=True, kw_only=True):
    """What is measured, and how much of it."""

    model: Annotated[str, Meta(description="folder or hub id of a Qwen-VL checkpoint; default is one with random weights")] = ""
    requests: Annotated[Positive, Meta(description="text requests per cluster")] = 80
    transports: Annotated[str, Meta(description="of the part transfer: some of shm,nixl,mooncake")] = "shm"


@dataclass(frozen=True, slots=True)
class ImageModel:
    options: ModelOptions
    spec: ImageSpec

    def text(self, seed: int, num_tokens: int) -> list[int]:
        """No two seeds begin alike."""
        return np.random.default_rng(seed).integers(10, 120, num_tokens).tolist()  # type: ignore[no-any-return]

    def prompt(self, image_seed: int, text_seed: int, num_tokens: int = 32) -> tuple[list[int], list[Image]]:
        """Text, then an image, then text: with another text before it, an image's KV is not the same."""
        tokens = [*self.text(text_seed, num_tokens), self.spec.vision_start_token_id]
        image = self._image(image_seed, len(tokens))
        tokens += [*placeholder_ids(image.digest, image.num_tokens), self.spec.vision_end_token_id]
        return tokens + self.text(text_seed, 8), [image]

    def _image(self, seed: int, start: int) -> Image:
        noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        file = io.BytesIO()
        PIL.Image.fromarray(noise).save(file, "PNG", compress_level=1)
        spec = self.spec
        height, width = target_size(SIDE, SIDE, factor=spec.factor, min_pixels=spec.min_pixels, max_pixels=spec.max_pixels)
        grid = grid_of(height, width, spec)
        return Image(
            digest=hashlib.blake2b(file.getvalue(), digest_size=16).hexdigest(),
            start=start,
            num_tokens=grid[1] * grid[2] // spec.merge_size**2,
            grid=grid,
            data=file.getvalue(),
        )


@contextlib.contextmanager
def open_model(name: str) -> Iterator[ImageModel]:
    """A checkpoint's folder or hub id; or, for an empty name, the one that is made here. Raises BenchError."""
    with contextlib.ExitStack() as stack:
        if name:
            folder = resolve(name, read_environment(), Silent())
        else:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-bench-vl-")))
            for file, content in (("config.json", _CONFIG), ("preprocessor_config.json", _PREPROCESSOR)):
                (folder / file).write_text(json.dumps(content), encoding="utf-8")
        spec = read_image_spec(folder)
        if spec is None:
            raise BenchError(f"--model {name}: it takes no images")
        yield ImageModel(ModelOptions(model=str(folder), dtype="float32", load="auto" if name else "dummy"), spec)
