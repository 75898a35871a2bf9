"""Reads the images of a conversation and places them among the prompt's tokens.

    read     fetches, checks and measures them, off the event loop and a few at a time
    place    the chat template wrote one token for each image: it becomes as many placeholders as the image has tokens

Only servers whose model takes images load this module, and with it the library that decodes images.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import hashlib
import struct
from collections.abc import Sequence

import msgspec

from kvrelay.config import RouterOptions
from kvrelay.errors import InvalidRequestError, MediaError
from kvrelay.frontend.prompt.images import Images, Part, Placed
from kvrelay.frontend.prompt.types import ProcessorOptions
from kvrelay.media.data_url import read_data_url
from kvrelay.media.decode import Limits, check
from kvrelay.media.fetch import Fetcher, FetchRules, allowed_hosts
from kvrelay.media.image_spec import ImageSpec
from kvrelay.media.placeholders import is_placeholder, placeholder_ids
from kvrelay.media.resize import target_size
from kvrelay.wire.serving import Image

LOW_DETAIL_PIXELS = 512 * 512  # the bound of `detail: low`, as far as the model allows it
# Placeholders tell images apart by 29 bits a token. With fewer tokens, a client could craft an image that passes for another.
_MIN_TOKENS = 4
_MIN_BOUND_TOKENS = 16  # the smallest max_pixels of a client; rounding down leaves more than _MIN_TOKENS
_DECODERS = 2
_FETCHES = 16
_REMEMBERED = 4096

Bounds = tuple[int, int]  # min_pixels and max_pixels of one image


class Media(Images):
    """Of a server whose model takes images. Remembers the sizes of files it has checked, not the files."""

    takes_images = True

    def __init__(self, spec: ImageSpec, options: RouterOptions, fetcher: Fetcher | None = None) -> None:
        self.spec = spec
        self._limits = Limits(max_bytes=options.max_image_bytes, max_pixels=options.max_image_pixels)
        self._max_images = options.max_images
        self._max_total_bytes = options.max_body_bytes
        self._fetcher = fetcher or Fetcher(
            FetchRules(
                allowed_hosts=allowed_hosts(options.allowed_media_hosts),
                max_bytes=options.max_image_bytes,
                timeout_s=options.media_timeout_s,
            )
        )
        self._fetches = asyncio.Semaphore(_FETCHES)
        self._decoders = concurrent.futures.ThreadPoolExecutor(_DECODERS, thread_name_prefix="media")
        self._sizes = _Sizes(self._limits)

    def check(self, parts: Sequence[Part], wanted: ProcessorOptions | None) -> None:
        return

    async def place(self, parts: Sequence[Part], wanted: ProcessorOptions | None, tokens: list[int]) -> Placed:
        self._check_places(tokens, len(parts))
        return _place(self.spec.image_token_id, tokens, await self.read(parts, wanted)) if parts else (tokens, [])

    def check_text(self, tokens: Sequence[int], field: str) -> None:
        if self.spec.image_token_id in tokens:
            raise InvalidRequestError(f"{field} may not contain the token that stands for an image", param=field)

    def shown(self, tokens: list[int]) -> list[int]:
        return [self.spec.image_token_id if is_placeholder(token) else token for token in tokens]

    async def read(self, parts: Sequence[Part], wanted: ProcessorOptions | None) -> list[Image]:
        """In the order of the parts, without their places. Several are read at the same time."""
        if len(parts) > self._max_images:
            field = parts[self._max_images].field
            message = f"{field}: a request may have at most {self._max_images} images, and this one has {len(parts)}"
            raise InvalidRequestError(message, param=field, code="too_many_images")
        bounds = [self._bounds(part, wanted) for part in parts]
        tasks = [asyncio.ensure_future(self._read(part, bound)) for part, bound in zip(parts, bounds, strict=True)]
        try:
            images = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if sum(len(image.data) for image in images) > self._max_total_bytes:
            message = f"the images of one request may have at most {self._max_total_bytes} bytes together"
            raise InvalidRequestError(message, param="messages", code="invalid_image")
        return images

    def _bounds(self, part: Part, wanted: ProcessorOptions | None) -> Bounds:
        """The part's own, else the request's, else the model's; `detail: low` on top."""
        spec, content = self.spec, part.content
        shared = wanted or ProcessorOptions()
        least, least_field = _asked(part, "min_pixels", content.min_pixels, shared.min_pixels)
        most, most_field = _asked(part, "max_pixels", content.max_pixels, shared.max_pixels)
        lowest = min(_MIN_BOUND_TOKENS * spec.factor**2, spec.max_pixels)
        if most is not None and not lowest <= most <= spec.max_pixels:
            raise InvalidRequestError(f"{most_field} must be from {lowest} to {spec.max_pixels}", param=most_field)
        upper = spec.max_pixels if most is None else most
        if content.image_url.detail == "low":
            upper = min(upper, max(LOW_DETAIL_PIXELS, lowest))
        if least is None:
            return (min(spec.min_pixels, upper), upper)
        if least > upper:
            raise InvalidRequestError(f"{least_field}: {least} is above the {upper} pixels allowed", param=least_field)
        return (min(max(least, _MIN_TOKENS * spec.factor**2), upper), upper)

    async def _read(self, part: Part, bounds: Bounds) -> Image:
        try:
            url = part.content.image_url.url
            if url[:5].lower() == "data:":
                return await self._off_loop(url, bounds)
            async with self._fetches:
                data = await self._fetcher.fetch(url)
            return await self._off_loop(data, bounds)
        except MediaError as error:
            raise InvalidRequestError(f"{part.field}: {error}", param=part.field, code="invalid_image") from error

    async def _off_loop(self, source: str | bytes, bounds: Bounds) -> Image:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, self._measure, source, bounds)

    def _measure(self, source: str | bytes, bounds: Bounds) -> Image:
        """Runs in a thread."""
        spec = self.spec
        data = read_data_url(source, self._limits.max_bytes) if isinstance(source, str) else source
        content = hashlib.blake2b(data, digest_size=20)
        seen_height, seen_width = self._sizes.of(data, content.digest())
        min_pixels, max_pixels = bounds
        height, width = target_size(seen_height, seen_width, factor=spec.factor, min_pixels=min_pixels, max_pixels=max_pixels)
        content.update(struct.pack(">II", height, width))
        rows, columns = height // spec.patch_size, width // spec.patch_size
        num_tokens = rows * columns // spec.merge_size**2
        return Image(digest=content.hexdigest(), start=0, num_tokens=num_tokens, grid=(1, rows, columns), data=data)

    def _check_places(self, tokens: list[int], num_images: int) -> None:
        """Also for conversations without images: no text may pass for one."""
        count = tokens.count(self.spec.image_token_id)
        if count != num_images:
            raise InvalidRequestError(
                f"the messages have {num_images} images, but the prompt made of them has {count} places for one: "
                "no text may contain the token that stands for an image",
                param="messages",
            )


def _place(image_token_id: int, tokens: list[int], found: Sequence[Image]) -> Placed:
    """The prompt with placeholders for its images. It has a place for each of them."""
    placed: list[int] = []
    images: list[Image] = []
    at = 0
    for one in found:
        here = tokens.index(image_token_id, at)
        placed += tokens[at:here]
        images.append(msgspec.structs.replace(one, start=len(placed)))
        placed += placeholder_ids(one.digest, one.num_tokens)
        at = here + 1
    return placed + tokens[at:], images


def _asked(part: Part, name: str, own: int | None, shared: int | None) -> tuple[int | None, str]:
    """A bound that the client set, and the field that sets it."""
    if own is not None or shared is None:
        return own, f"{part.field}.{name}"
    return shared, f"mm_processor_kwargs.{name}"


class _Sizes:
    """Height and width of files by digest, since a conversation sends its images again with every turn. Several threads use it:
    each operation on the table is atomic, and measuring a file twice does no harm."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: collections.OrderedDict[bytes, tuple[int, int]] = collections.OrderedDict()

    def of(self, data: bytes, digest: bytes) -> tuple[int, int]:
        """Raises MediaError."""
        size = self._known.pop(digest, None) or check(data, self._limits)
        self._known[digest] = size
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return size
