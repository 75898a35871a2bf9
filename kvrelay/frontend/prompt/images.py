"""Images in a conversation's messages: which parts they are, what the chat template sees of them, where they may not be.

    image_parts    which parts of which messages are images
    template_parts   what the chat template sees of a message with images
    place_images   the prompt's tokens with placeholders for them (media.py)

An image that cannot be used is the client's fault: 400, naming the part. Only user messages have images, as in OpenAI's API.
Requests without images pass through none of this, but for one look at whether they hold the token that stands for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.types import ChatMessage, ChatRequest, ImagePart, RefusalPart, TextPart, UserMessage
from kvrelay.wire.serving import Image

if TYPE_CHECKING:
    from kvrelay.frontend.prompt.media import Media


class Part(msgspec.Struct, frozen=True):
    """An image as it was sent."""

    field: str  # its place, such as messages[0].content[1]
    content: ImagePart


def image_parts(media: Media | None, request: ChatRequest) -> list[Part]:
    """Of a request that may have them."""
    parts = _find_parts(request.messages or ())
    if parts and media is None:
        raise InvalidRequestError(f"{parts[0].field}: this model takes no images", param=parts[0].field, code="no_images")
    if media is None and request.mm_processor_kwargs is not None:
        raise InvalidRequestError("mm_processor_kwargs: this model takes no images", param="mm_processor_kwargs")
    if parts and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be told of prompts with images", param="prompt_logprobs")
    return parts


async def place_images(
    media: Media | None, request: ChatRequest, parts: Sequence[Part], tokens: list[int]
) -> tuple[list[int], list[Image]]:
    """The prompt's tokens with placeholders in them, and what these stand for."""
    if media is None:
        return tokens, []
    media.check_places(tokens, len(parts))
    if not parts:
        return tokens, []
    return media.place(tokens, await media.read(parts, request.mm_processor_kwargs))


def shifted(images: list[Image], num_cut: int) -> list[Image]:
    """Where they are when so many tokens are left out at the prompt's beginning. No image may be among these."""
    if not images or num_cut <= 0:
        return images
    if num_cut >= images[0].start:  # the token before an image announces it
        raise InvalidRequestError(
            f"truncate_prompt_tokens leaves out {num_cut} tokens, which would cut the image at token {images[0].start}",
            param="truncate_prompt_tokens",
        )
    return [msgspec.structs.replace(image, start=image.start - num_cut) for image in images]


def refuse_parts(messages: Sequence[ChatMessage], where: str) -> None:
    for part in _find_parts(messages):
        raise InvalidRequestError(f"{part.field}: {where} takes no images", param=part.field)


def _find_parts(messages: Sequence[ChatMessage]) -> list[Part]:
    found: list[Part] = []
    for place, message in enumerate(messages):
        if isinstance(message, UserMessage) and not isinstance(message.content, str):
            for number, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    found.append(Part(f"messages[{place}].content[{number}]", part))
    return found


def template_parts(content: Sequence[TextPart | RefusalPart | ImagePart]) -> list[dict[str, Any]]:
    """Templates of models that take images take a message's content in parts."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, ImagePart):
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal})
    return parts
