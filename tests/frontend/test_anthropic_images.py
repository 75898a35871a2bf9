"""Images as Anthropic's SDK sends them, in the body, by URL and in the results of tools; and how they are counted."""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.frontend.prompt import media as media_module
from kvrelay.media.fetch import Fetcher
from tests.frontend.serving import fake_backend, running_server
from tests.frontend.test_media import check_request, image_app, text, tokenizer, tokens_of, without_images
from tests.media.images import png
from tests.media.test_media_fetch import world

PNG = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + png(96, 64)
USUAL: Any = {"model": "tiny", "max_tokens": 8}


@contextlib.asynccontextmanager
async def sdk(**options: Any) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, FakeBackend]]:
    backend = fake_backend("fine", max_model_len=8192)
    with running_server(image_app(backend, **options)) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as client:
            yield client, backend
    assert backend.num_open == 0


def inline(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def asked(*content: dict[str, Any]) -> Any:
    return [{"role": "user", "content": [*content]}]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_image_in_the_body(streamed: bool) -> None:
    messages = asked(text("look: "), inline(png(96, 64)), text(" nice?"))
    async with sdk() as (client, backend):
        if streamed:
            async with client.messages.stream(**USUAL, messages=messages) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await client.messages.create(**USUAL, messages=messages)
        (request,) = backend.submitted
        counted = await client.messages.count_tokens(model="tiny", messages=messages)
    check_request(request)
    rendered = "<|im_start|>user\nlook: <|vision_start|><|image_pad|><|vision_end|> nice?<|im_end|>\n<|im_start|>assistant\n"
    assert without_images(request) == tokens_of(rendered)
    assert [(image.data, image.num_tokens) for image in request.images] == [(png(96, 64), 6)]
    assert answer.content[0].text == "fine"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(request.prompt) == counted.input_tokens


async def test_an_image_of_an_allowed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world({"/p.png": PNG}) as there:
        monkeypatch.setattr(media_module, "Fetcher", functools.partial(Fetcher, resolve=there.resolve, connect=there.connect))
        async with sdk(allowed_media_hosts="a.test") as (client, backend):
            by_url: Any = {"type": "image", "source": {"type": "url", "url": "https://a.test/p.png"}}
            await client.messages.create(**USUAL, messages=asked(by_url, text("?")))
            await client.messages.create(**USUAL, messages=asked(inline(png(96, 64)), text("?")))
            fetched, sent = backend.submitted
            assert (list(fetched.prompt), fetched.images) == (list(sent.prompt), sent.images)
            counted = await client.messages.count_tokens(model="tiny", messages=asked(by_url, text("?")))
            assert counted.input_tokens == len(fetched.prompt)
            elsewhere: Any = {"type": "image", "source": {"type": "url", "url": "http://c.test/p.png"}}
            with pytest.raises(
                anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]: this server fetches no images from"
            ):
                await client.messages.create(**USUAL, messages=asked(by_url, elsewhere))


async def test_an_image_in_the_result_of_a_tool() -> None:
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": [text("a chart"), inline(png(64, 64))]}
    messages: Any = [
        *asked(text("draw")),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "draw", "input": {}}]},
        *asked(result, text("what is it?")),
    ]
    async with sdk() as (client, backend):
        await client.messages.create(**USUAL, messages=messages)
        (request,) = backend.submitted
    check_request(request)
    shown = tokenizer().decode(without_images(request), skip_special_tokens=False)
    assert shown.index("a chart") < shown.index("<|image_pad|>") < shown.index("what is it?")


async def test_images_that_leave_no_room_are_counted_and_refused() -> None:
    messages = asked(*[inline(png(1024, 1024))] * 8)
    async with sdk() as (client, _):
        counted = await client.messages.count_tokens(model="tiny", messages=messages)
        assert counted.input_tokens > 8 * 1024
        with pytest.raises(anthropic.BadRequestError, match="this model's maximum context length is 8192 tokens"):
            await client.messages.create(**USUAL, messages=messages)
