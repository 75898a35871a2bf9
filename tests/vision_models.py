"""Prompts with pixels for the tiny vision-language checkpoints, and what transformers makes of them."""

from __future__ import annotations

import functools
import hashlib
import io
import pathlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers
from parity import TIE
from scratch import scratch_folder
from tiny_vl import IMAGE_TOKEN_ID, make_tiny_vl

from kvrelay.media.image_spec import ImageSpec, read_image_spec
from kvrelay.media.patches import grid_of
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.media.resize import target_size
from kvrelay.wire.serving import Image

Kind = Literal["qwen3_vl", "qwen2_5_vl", "qwen2_vl"]
KINDS: tuple[Kind, ...] = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
Size = tuple[int, int]  # width, height


@dataclass(frozen=True, slots=True)
class Prompt:
    """One message with images before its text, for us and for transformers."""

    tokens: list[int]  # with placeholders, as workers see it
    images: list[Image]
    pixels: list[PIL.Image.Image]

    @property
    def reference_tokens(self) -> list[int]:
        covered = {index for image in self.images for index in range(image.start, image.start + image.num_tokens)}
        return [IMAGE_TOKEN_ID if index in covered else token for index, token in enumerate(self.tokens)]


@functools.cache
def tiny_vl(kind: Kind, layout: Literal["hub", "transformers"] = "hub") -> pathlib.Path:
    folder = _session_folder() / f"{kind}-{layout}"
    make_tiny_vl(folder, kind, layout=layout)
    return folder


@functools.cache
def reference_vl(kind: Kind, layout: Literal["hub", "transformers"] = "hub") -> Any:
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny_vl(kind, layout), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # so that all outputs have the same length
    return model


@functools.cache
def image_spec(kind: Kind) -> ImageSpec:
    spec = read_image_spec(tiny_vl(kind))
    assert spec is not None
    return spec


@functools.cache
def image_processor(kind: Kind) -> Any:
    return transformers.Qwen2VLImageProcessorPil.from_pretrained(tiny_vl(kind))


def drawn(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """Gradients with noise, so that every part of it looks different."""
    rng = np.random.Generator(np.random.PCG64(seed))
    down, right = np.mgrid[0:height, 0:width]
    colours = [right * 255 // max(1, width - 1), down * 255 // max(1, height - 1), (right + down + 41 * seed) % 256]
    return PIL.Image.fromarray(((np.stack(colours, -1) + rng.integers(0, 64, (height, width, 3))) % 256).astype(np.uint8))


def read_drawn(data: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


def make_prompt(kind: Kind, sizes: list[Size], text: str, seed: int = 0) -> Prompt:
    spec = image_spec(kind)
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_vl(kind) / "tokenizer.json"))
    tokens: list[int] = tokenizer.encode("<|im_start|>user\n").ids
    images, pixels = [], [drawn(width, height, seed + index) for index, (width, height) in enumerate(sizes)]
    for one in pixels:
        file = io.BytesIO()
        one.save(file, "PNG", compress_level=1)
        height, width = target_size(
            one.height, one.width, factor=spec.factor, min_pixels=spec.min_pixels, max_pixels=spec.max_pixels
        )
        grid = grid_of(height, width, spec)
        num_tokens = grid[1] * grid[2] // spec.merge_size**2
        digest = hashlib.blake2b(file.getvalue() + f"{height}x{width}".encode(), digest_size=16).hexdigest()
        tokens.append(spec.vision_start_token_id)
        images.append(Image(digest=digest, start=len(tokens), num_tokens=num_tokens, grid=grid, data=file.getvalue()))
        tokens += [*placeholder_ids(digest, num_tokens), spec.vision_end_token_id]
    tokens += tokenizer.encode(f"{text}<|im_end|>\n<|im_start|>assistant\n").ids
    return Prompt(tokens, images, pixels)


@torch.inference_mode()
def reference_output(kind: Kind, prompt: Prompt, count: int) -> tuple[list[int], list[bool]]:
    """transformers' greedy tokens, and which of them were ties."""
    tokens = torch.tensor([prompt.reference_tokens])
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if prompt.pixels:
        inputs |= image_processor(kind)(images=prompt.pixels, return_tensors="pt")
        inputs["mm_token_type_ids"] = (tokens == IMAGE_TOKEN_ID).int()
    result = reference_vl(kind).generate(
        **inputs, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.cat(result.logits).topk(2).values
    return result.sequences[0, tokens.shape[1] :].tolist(), (best[:, 0] - best[:, 1] < TIE).tolist()


@functools.cache
def _session_folder() -> pathlib.Path:
    return scratch_folder("kvrelay-tiny-vl-")
