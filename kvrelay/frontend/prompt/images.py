"""Images in a conversation's messages: which parts they are, what the chat template sees of them, and where they may be.

    image_parts      which parts of which messages are images
    template_parts   a message with images, as the chat template sees it
    Images           places them in the prompt

An image that cannot be used is the client's fault: 400, naming the part. Only user messages have images, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.types import (
    ChatMessage,
    ChatRequest,
    ImagePart,
    ProcessorOptions,
    RefusalPart,
    TextPart,
    UserMessage,
)
from kvrelay.wire.serving import Image

Placed = tuple[list[int], list[Image]]


class Part(msgspec.Struct, frozen=True):
    """An image as it was sent."""

    field: str  # its place, such as messages[0].content[1]
    content: ImagePart


class Images:
    """What a server does with the images of its requests. This one's model takes none; `media.Media` is for those that do."""

    takes_images = False

    def check(self, parts: Sequence[Part], wanted: ProcessorOptions | None) -> None:
        """Refuses images, and options for them, that this model cannot use."""
        if parts:
            raise InvalidRequestError(f"{parts[0].field}: this model takes no images", param=parts[0].field, code="no_images")
        if wanted is not None:
            raise InvalidRequestError("mm_processor_kwargs: this model takes no images", param="mm_processor_kwargs")

    async def place(self, parts: Sequence[Part], wanted: ProcessorOptions | None, tokens: list[int]) -> Placed:
        """The prompt's tokens with placeholders for the images, and the images. Raises InvalidRequestError."""
        return tokens, []

    def check_text(self, tokens: Sequence[int], field: str) -> None:
        """Refuses text that contains the token that stands for an image."""

    def shown(self, tokens: list[int]) -> list[int]:
        """A prompt's tokens as the model's own tokenizer has them, without placeholders."""
        return tokens


def image_parts(images: Images, request: ChatRequest) -> list[Part]:
    parts = _find_parts(request.messages or ())
    images.check(parts, request.mm_processor_kwargs)
    if parts and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be combined with images", param="prompt_logprobs")
    return parts


def shifted(images: list[Image], num_cut: int) -> list[Image]:
    """The images of a prompt whose first `num_cut` tokens are left out. No image may be among these."""
    if not images or num_cut <= 0:
        return images
    if num_cut >= images[0].start:  # the token before an image announces it
        raise InvalidRequestError(
            f"truncate_prompt_tokens leaves out {num_cut} tokens, which would cut the image at token {images[0].start}",
            param="truncate_prompt_tokens",
        )
    return [msgspec.structs.replace(image, start=image.start - num_cut) for image in images]


def has_images(messages: Sequence[ChatMessage]) -> bool:
    return bool(_find_parts(messages))


def refuse_parts(messages: Sequence[ChatMessage], where: str) -> None:
    for part in _find_parts(messages):
        raise InvalidRequestError(f"{part.field}: {where} takes no images", param=part.field)


def _find_parts(messages: Sequence[ChatMessage]) -> list[Part]:
    return [
        Part(f"messages[{place}].content[{number}]", part)
        for place, message in enumerate(messages)
        if isinstance(message, UserMessage) and not isinstance(message.content, str)
        for number, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def template_parts(content: Sequence[TextPart | RefusalPart | ImagePart]) -> list[dict[str, Any]]:
    """Templates of models that take images expect a message's content in parts."""
    return [{"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": text_of(part)} for part in content]


def text_of(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal
