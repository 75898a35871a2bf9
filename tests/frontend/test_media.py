"""Conversations with images, over HTTP: what workers get, what is counted, and which part is blamed for what is wrong."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S
from PIL import Image as PillowImage
from scratch import scratch_folder

from kvrelay.config import RouterOptions
from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.app import FrontEnd, create_app
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.frontend.prompt import media as media_module
from kvrelay.frontend.prompt.images import Part
from kvrelay.frontend.prompt.media import Media
from kvrelay.frontend.prompt.types import ImagePart, ImageUrl
from kvrelay.media.image_spec import ImageSpec
from kvrelay.media.placeholders import is_placeholder, placeholder_ids
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import Image
from tests.frontend.serving import fake_backend, http_client, make_app
from tests.media.images import data_url, drawn, encoded, exif, png, png_of_size
from tests.media.test_media_fetch import world
from tests.text.tiny_tokenizers import byte_level_backend

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    folder = scratch_folder("tokenizer-")
    backend = byte_level_backend()
    backend.add_special_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def token(text: str) -> int:
    found = tokenizer().token_id(text)
    assert found is not None
    return found


@functools.cache
def spec() -> ImageSpec:
    return ImageSpec(
        family="qwen3_vl",
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        min_pixels=4096,
        max_pixels=1 << 20,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        image_token_id=token("<|image_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        num_deepstack=3,
        hidden_size=128,
    )


class Server:
    def __init__(self, backend: FakeBackend, client: httpx.AsyncClient) -> None:
        self.backend = backend
        self._client = client

    async def post(self, content: Any = None, path: str = CHAT, **body: Any) -> httpx.Response:
        if content is not None:
            body = {"messages": [{"role": "user", "content": content}], **body}
        return await self._client.post(path, json=body)

    async def submitted(self, content: Any = None, **body: Any) -> GenerateRequest:
        """What the backend got of a request that is served."""
        answer = await self.post(content, **body)
        assert answer.status_code == 200, answer.text
        request = self.backend.submitted[-1]
        check_request(request)
        usage = answer.json()["usage"]
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(request.prompt)
        return request

    async def refused(self, content: Any = None, path: str = CHAT, **body: Any) -> tuple[str, str]:
        """The field that is blamed, and why. Nothing reaches the backend."""
        before = len(self.backend.submitted)
        answer = await self.post(content, path, **body)
        assert answer.status_code == 400, answer.text
        assert len(self.backend.submitted) == before
        error = answer.json()["error"]
        return error["param"], error["message"]


def check_request(request: GenerateRequest) -> None:
    """Placeholders are where the images say, between the tokens that open and close them, and nowhere else."""
    prompt = list(request.prompt)
    for image in request.images:
        end = image.start + image.num_tokens
        assert prompt[image.start : end] == placeholder_ids(image.digest, image.num_tokens)
        assert prompt[image.start - 1] == token("<|vision_start|>")
        assert prompt[end] == token("<|vision_end|>")
        assert image.grid[0] * image.grid[1] * image.grid[2] == 4 * image.num_tokens
    assert sum(map(is_placeholder, prompt)) == sum(image.num_tokens for image in request.images)


def image_app(backend: FakeBackend, **options: Any) -> FrontEnd:
    return create_app(
        backend, tokenizer(), metrics=Metrics(), options=RouterOptions(**options), model="tiny", image_spec=spec()
    )


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Server]:
    backend = fake_backend("fine", max_model_len=8192)
    async with http_client(image_app(backend, **options)) as client:
        yield Server(backend, client)
    assert backend.num_open == 0


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(data: bytes, detail: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": detail}, **fields}


def tokens_of(content: str) -> list[int]:
    return tokenizer().encode(content, add_special_tokens=False)


def without_images(request: GenerateRequest) -> list[int]:
    """With one token for each image again: what the template wrote."""
    tokens, at = [], 0
    for image in request.images:
        tokens += [*request.prompt[at : image.start], spec().image_token_id]
        at = image.start + image.num_tokens
    return [*tokens, *request.prompt[at:]]


# What is served


async def test_a_image_between_texts() -> None:
    data = png(96, 64)
    async with serving() as server:
        request = await server.submitted([text("look: "), image(data), text(" nice?")])
    rendered = "<|im_start|>user\nlook: <|vision_start|><|image_pad|><|vision_end|> nice?<|im_end|>\n<|im_start|>assistant\n"
    assert without_images(request) == tokens_of(rendered)
    assert request.images == [
        Image(
            digest=request.images[0].digest,
            start=tokens_of(rendered).index(spec().image_token_id),
            num_tokens=6,
            grid=(1, 4, 6),
            data=data,
        )
    ]


async def test_several_messages_and_every_format() -> None:
    files = [encoded(drawn(64, 64), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    turned = encoded(drawn(96, 64), "JPEG", exif=exif(6))
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image(files[0]), image(files[1]), text("which?")]},
        {"role": "assistant", "content": "the first"},
        {"role": "user", "content": [text("and"), image(files[2]), text("or"), image(files[3]), image(turned)]},
    ]
    async with serving() as server:
        request = await server.submitted(messages=messages)
    assert [image.data for image in request.images] == [*files, turned]
    assert [image.grid for image in request.images] == [(1, 4, 4)] * 4 + [(1, 6, 4)]


async def test_twenty_images() -> None:
    files = [png(64, 64, seed=number) for number in range(20)]
    async with serving() as server:
        request = await server.submitted([image(data) for data in files])
    assert [image.data for image in request.images] == files
    assert len({image.digest for image in request.images}) == 20


async def test_equal_images_have_equal_digests_and_others_do_not() -> None:
    data = png(256, 256)
    async with serving() as server:
        first = await server.submitted([image(data), image(data, max_pixels=128 * 128), image(data + b" ")])
        again = await server.submitted([text("x"), image(data)])
    digests = [image.digest for image in first.images]
    assert len(set(digests)) == 3
    assert again.images[0].digest == digests[0]


async def test_a_file_that_was_seen_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    check = media_module.check

    def counted(data: bytes, limits: Any) -> tuple[int, int]:
        decoded.append(data)
        return check(data, limits)

    monkeypatch.setattr(media_module, "check", counted)
    async with serving() as server:
        for _ in range(3):
            await server.submitted([image(png(64, 64)), text("?")])
        assert decoded == [png(64, 64)]
        assert (await server.refused([image(png(64, 64)[:-40])]))[0] == "messages[0].content[0]"
        assert (await server.refused([image(png(64, 64)[:-40])]))[0] == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("fields", "body", "grid"),
    [
        ({}, {}, (1, 64, 64)),
        ({"detail": "high"}, {}, (1, 64, 64)),
        ({"detail": "auto"}, {}, (1, 64, 64)),
        ({"detail": "low"}, {}, (1, 32, 32)),
        ({"max_pixels": 128 * 128}, {}, (1, 8, 8)),
        ({}, {"mm_processor_kwargs": {"max_pixels": 256 * 256}}, (1, 16, 16)),
        ({"max_pixels": 128 * 128}, {"mm_processor_kwargs": {"max_pixels": 256 * 256}}, (1, 8, 8)),
        ({"detail": "low", "max_pixels": 256 * 256}, {}, (1, 16, 16)),
        ({"detail": "low", "max_pixels": 768 * 768}, {}, (1, 32, 32)),
        ({"min_pixels": 784}, {}, (1, 64, 64)),
    ],
)
async def test_how_large_a_image_becomes(fields: dict[str, Any], body: dict[str, Any], grid: tuple[int, int, int]) -> None:
    async with serving() as server:
        request = await server.submitted([image(png(1024, 1024), **fields)], **body)
    assert request.images[0].grid == grid


@pytest.mark.parametrize(
    ("fields", "body", "grid"),
    [
        ({}, {}, (1, 4, 4)),
        ({"min_pixels": 128 * 128}, {}, (1, 8, 8)),
        ({}, {"mm_processor_kwargs": {"min_pixels": 128 * 128}}, (1, 8, 8)),
        ({"min_pixels": 1}, {}, (1, 4, 4)),  # few tokens could not tell images apart
    ],
)
async def test_how_small_a_image_stays(fields: dict[str, Any], body: dict[str, Any], grid: tuple[int, int, int]) -> None:
    async with serving() as server:
        request = await server.submitted([image(png(16, 16), **fields)], **body)
    assert request.images[0].grid == grid


async def test_responses_take_images() -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": data_url(png()), "detail": "low"}]
    message = {"role": "user", "content": parts}
    broken = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}
    async with serving() as server:
        request = await server.submitted(path="/v1/responses", input=[message], instructions="be brief")
        assert len(request.images) == 1
        blamed, reason = await server.refused(path="/v1/responses", input=[message, broken], instructions="be brief")
        assert (blamed, reason) == ("input[1].content[0]", "input[1].content[0]: not a JPEG, PNG, WebP or GIF file")
        blamed, _ = await server.refused(path="/v1/responses", input=[{**message, "role": "developer"}])
        assert blamed == "input[0].content[1]"


async def test_a_stored_response_has_the_images_of_its_turns() -> None:
    seen, more = ({"type": "input_image", "image_url": data_url(png(size, 64))} for size in (96, 64))
    look = {"role": "user", "content": [{"type": "input_text", "text": "look"}, seen]}
    async with serving() as server:
        answer = await server.post(path="/v1/responses", input=[look], store=True)
        usual = {"path": "/v1/responses", "previous_response_id": answer.json()["id"]}
        first = server.backend.submitted[0]
        again = await server.submitted(input="again?", **usual)
        assert again.parent is not None
        assert list(again.prompt)[: len(first.prompt)] == list(first.prompt)
        assert again.images == first.images
        anew = await server.submitted(input=[{"role": "user", "content": [more]}], **usual)
        assert anew.parent is None
        assert anew.images[:1] == first.images
        assert [image.data for image in anew.images] == [png(96, 64), png(64, 64)]
        other = await server.submitted(input="again?", instructions="be brief", **usual)
        assert [image.digest for image in other.images] == [image.digest for image in first.images]


async def test_prompt_token_ids_are_those_of_the_tokenizer() -> None:
    async with serving() as server:
        for stream in (False, True):
            answer = await server.post([image(png())], return_token_ids=True, stream=stream)
            first = json.loads(answer.text.split("\n")[0].removeprefix("data: "))
            shown = first["prompt_token_ids"]
            assert shown.count(spec().image_token_id) == 4
            assert not any(map(is_placeholder, shown))
            assert len(shown) == len(server.backend.submitted[-1].prompt)


async def test_truncation_may_leave_out_text_before_a_image() -> None:
    content = [text("some words before it "), image(png()), text("?")]
    async with serving() as server:
        whole = await server.submitted(content)
        start, length = whole.images[0].start, len(whole.prompt)
        cut = await server.submitted(content, truncate_prompt_tokens=length - start + 1)
        assert cut.images[0].start == 1
        assert (await server.submitted(content, truncate_prompt_tokens=length + 5)).images == whole.images
        for kept in (length - start, length - start - 1, 5):
            assert (await server.refused(content, truncate_prompt_tokens=kept))[0] == "truncate_prompt_tokens"


async def test_images_are_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder waits for something that only the loop can do meanwhile."""
    begun, go = threading.Event(), threading.Event()

    def waiting(data: bytes, limits: Any) -> tuple[int, int]:
        begun.set()
        assert go.wait(PATIENCE_S)
        return 64, 64

    monkeypatch.setattr(media_module, "check", waiting)
    async with serving() as server:
        request = asyncio.ensure_future(server.submitted([image(png())]))
        while not begun.is_set():
            await asyncio.sleep(0)
        assert (await server.post("and texts go on")).status_code == 200
        go.set()
        assert len((await request).images) == 1


async def test_a_fetched_image_is_the_same_as_one_that_was_sent() -> None:
    data = png()
    async with world({"/p.png": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + data}) as there:
        media = Media(spec(), RouterOptions(), there.fetcher())
        urls = ["http://a.test/p.png", data_url(data), "HTTPS://b.test:8080/p.png", "http://c.test/p.png"]
        parts = [Part(f"part {n}", ImagePart(image_url=ImageUrl(url=url))) for n, url in enumerate(urls)]
        images = await media.read(parts[:3], None)
        assert [image.data for image in images] == [data] * 3
        assert len({image.digest for image in images}) == 1
        with pytest.raises(InvalidRequestError, match="part 3: this server fetches no images from") as caught:
            await media.read(parts, None)
        assert caught.value.param == "part 3"


async def test_the_images_of_a_request_are_limited_together() -> None:
    media = Media(spec(), RouterOptions(max_body_bytes=100_000))
    noise = [encoded(PillowImage.effect_noise((200, 200), 80), "PNG") for _ in range(4)]
    parts = [Part(str(n), ImagePart(image_url=ImageUrl(url=data_url(data)))) for n, data in enumerate(noise)]
    assert len(await media.read(parts[:2], None)) == 2
    with pytest.raises(InvalidRequestError, match="100000 bytes together"):
        await media.read(parts, None)


# What is refused


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,iVBORw0KGgo!", "not valid base64"),
        ("data:image/png;base64,", "the file is empty"),
        (data_url(b"%PDF-1.7"), "not a JPEG, PNG, WebP or GIF file"),
        (data_url(png()[:60]), "the PNG file cannot be decoded"),
        (data_url(png_of_size(10_000, 10_000)), "10000x10000 is more than"),
        (data_url(png_of_size(0, 10)), "has no content"),
        (data_url(png(402, 2)), "more than 200 times"),
        (data_url(bytes(100_001)), "the limit is 100000|larger than 100000 bytes"),
        ("http://example.com/a.png", "fetches no images from 'example.com'"),
        ("http://169.254.169.254/latest/meta-data", "fetches no images from"),
        ("file:///etc/passwd", "file: images come from http:, https: and data: URLs"),
        ("/etc/passwd", "no scheme"),
        ("", "no scheme"),
    ],
)
async def test_a_bad_image_is_refused_by_its_place(url: str, reason: str) -> None:
    bad = {"type": "image_url", "image_url": {"url": url}}
    messages = [
        {"role": "user", "content": [image(png())]},
        {"role": "user", "content": [text("and"), image(png()), bad]},
    ]
    async with serving(max_image_bytes=100_000) as server:
        blamed, message = await server.refused(messages=messages)
    assert blamed == "messages[1].content[2]"
    assert message.startswith(f"{blamed}: ")
    assert any(wanted in message for wanted in reason.split("|")), message


@pytest.mark.parametrize(
    ("fields", "body", "blamed"),
    [
        ({"max_pixels": 100}, {}, "messages[0].content[0].max_pixels"),
        ({"max_pixels": (1 << 20) + 1}, {}, "messages[0].content[0].max_pixels"),
        ({"min_pixels": (1 << 20) + 1}, {}, "messages[0].content[0].min_pixels"),
        ({"min_pixels": 500_000, "detail": "low"}, {}, "messages[0].content[0].min_pixels"),
        ({}, {"mm_processor_kwargs": {"max_pixels": 100}}, "mm_processor_kwargs.max_pixels"),
        ({}, {"mm_processor_kwargs": {"min_pixels": 300_000, "max_pixels": 200_000}}, "mm_processor_kwargs.min_pixels"),
        ({}, {"mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs.fps"),
        ({}, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({}, {"continue_final_message": True}, "messages"),
    ],
)
async def test_what_does_not_go_with_images(fields: dict[str, Any], body: dict[str, Any], blamed: str) -> None:
    async with serving() as server:
        assert (await server.refused([image(png(), **fields)], **body))[0] == blamed


async def test_too_many_images_or_bytes_are_refused() -> None:
    async with serving(max_images=2) as server:
        assert (await server.refused([image(png())] * 3))[0] == "messages[0].content[2]"
        await server.submitted([image(png())] * 2)
    async with serving(max_images=0) as server:
        assert (await server.refused([image(png())]))[0] == "messages[0].content[0]"


async def test_a_prompt_that_is_too_long_counts_its_placeholders() -> None:
    async with serving() as server:
        blamed, message = await server.refused([image(png(1024, 1024))] * 8)
    assert blamed == "messages"
    assert "maximum context length is 8192 tokens" in message


@pytest.mark.parametrize("words", ["<|image_pad|>", "a <|vision_start|><|image_pad|><|vision_end|> b"])
async def test_a_text_does_not_pass_for_a_image(words: str) -> None:
    async with serving() as server:
        assert (await server.refused(words))[0] == "messages"
        assert (await server.refused([text(words), image(png())]))[0] == "messages"
        assert (await server.refused([text("<|image_"), text("pad|>"), image(png())]))[0] == "messages"
        harmless = await server.submitted("what is <|vision_start|> for?")
        assert harmless.images == []


async def test_where_images_do_not_belong() -> None:
    async with serving() as server:
        for role in ("system", "assistant"):
            messages = [{"role": role, "content": [image(png())]}, {"role": "user", "content": "?"}]
            assert (await server.refused(messages=messages))[0] == "messages[0].content[0].type"
        messages = [{"role": "user", "content": [image(png())]}]
        assert (await server.refused(path="/tokenize", messages=messages))[0] == "messages[0].content[0]"
        prompt = [placeholder_ids("00", 1)[0]]
        assert (await server.refused(path="/v1/completions", prompt=prompt))[0] == "prompt"
        for words, blamed in (("a <|image_pad|>", "prompt"), (["a", "<|image_pad|>"], "prompt[1]")):
            assert (await server.refused(path="/v1/completions", prompt=words))[0] == blamed


async def test_a_text_model_takes_no_images() -> None:
    backend = fake_backend("fine")
    async with http_client(make_app(backend)) as client:
        server = Server(backend, client)
        blamed, message = await server.refused([text("see"), image(png())])
        assert (blamed, message) == ("messages[0].content[1]", "messages[0].content[1]: this model takes no images")
        assert (await server.refused("hi", mm_processor_kwargs={"max_pixels": 9}))[0] == "mm_processor_kwargs"
        assert (await server.post("hi")).status_code == 200
    assert backend.submitted[0].images == []


async def test_images_in_a_tools_result_are_shown_before_what_the_user_says() -> None:
    """Of Anthropic's form: the same prompt as with the images in the user's own words."""
    first, second, third = (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}}
        for data in (png(64, 64), png(96, 64), png(64, 96))
    )
    asked = {"type": "text", "text": "Which?"}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    before = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "two"}, first, second]}
    plain = {"type": "tool_result", "tool_use_id": "a", "content": "two"}
    async with serving() as server:
        for content in ([result, third, asked], [plain, first, second, third, asked]):
            messages = [*before, {"role": "user", "content": content}]
            answer = await server.post(path="/v1/messages", max_tokens=4, messages=messages)
            assert answer.status_code == 200, answer.text
        inside, outside = server.backend.submitted
        assert len(inside.images) == 3
        assert inside.prompt == outside.prompt
        assert inside.images == outside.images
