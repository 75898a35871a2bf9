"""Several names for one model, a path in front of all others, a chat template from a file, and sampling in responses."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from kvrelay.config import RouterOptions
from kvrelay.errors import ConfigError, ModelError
from kvrelay.text.tokenizer import Tokenizer
from tests.frontend.serving import MODEL, TOKENIZER, fake_backend, http_client, make_app
from tests.text.tiny_tokenizers import RICH, folder_of

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"


async def test_a_model_may_have_several_names() -> None:
    async with http_client(make_app(fake_backend("hello"), RouterOptions(served_model_name="large, gpt-4"))) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["large", "gpt-4"]
        assert (await client.get("/v1/models/gpt-4")).json()["id"] == "gpt-4"
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 404
        for name in ("large", "gpt-4"):
            answer = (await client.post(COMPLETIONS, json={"model": name, "prompt": "hello"})).json()
            assert answer["model"] == "large"
        refused = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "hello"})
        assert refused.status_code == 404
        assert "'large', 'gpt-4'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("names", [",", "a,", "a,,b", "a,a"])
def test_names_that_are_none_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name"):
        make_app(fake_backend(), RouterOptions(served_model_name=names))


async def test_a_root_path_may_be_there_or_not() -> None:
    options = RouterOptions(root_path="/llm/a", api_key="secret")
    async with http_client(make_app(fake_backend("hello"), options)) as client:
        key = {"authorization": "Bearer secret"}
        for root in ("", "/llm/a"):
            assert (await client.get(f"{root}/health")).status_code == 200
            assert (await client.get(f"{root}/v1/models")).status_code == 401
            assert (await client.get(f"{root}/v1/models/{MODEL}", headers=key)).status_code == 200
            answer = await client.post(root + COMPLETIONS, json={"prompt": "hello"}, headers=key)
            assert answer.status_code == 200, answer.text
        assert (await client.get("/llm/a", headers=key)).json()["docs"] == "/llm/a/docs"
        assert (await client.get("/openapi.json", headers=key)).json()["servers"] == [{"url": "/llm/a"}]
        assert (await client.get("/llm/ab/v1/models", headers=key)).status_code == 404
        assert '"/openapi.json"' not in (await client.get("/docs", headers=key)).text


@pytest.mark.parametrize("path", ["llm", "/llm/", "/"])
def test_a_root_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="--root-path"):
        make_app(fake_backend(), RouterOptions(root_path=path))


def test_a_chat_template_may_come_from_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}{{ eos_token }}")
    tokenizer = Tokenizer.load(folder_of("byte_level", RICH), chat_template=str(file))
    assert tokenizer.render_chat([{"role": "user", "content": "hello"}]) == "[hello]<|im_end|>"
    assert not tokenizer.takes_tools
    with pytest.raises(ConfigError, match=r"--chat-template .*nowhere"):
        Tokenizer.load(folder_of("byte_level"), chat_template=str(tmp_path / "nowhere"))
    file.write_text("{% for")
    with pytest.raises(ModelError, match="chat template"):
        Tokenizer.load(folder_of("byte_level"), chat_template=str(file))


async def test_responses_take_the_sampling_of_chats() -> None:
    settings: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 7,
    }  # fmt: skip
    backend = fake_backend("one two three")
    async with http_client(make_app(backend)) as client:
        answer = await client.post(RESPONSES, json={"input": "hello", "stop": "two", **settings})
        assert answer.json()["output"][0]["content"][0]["text"] == "one "
        params = backend.submitted[0].params
        assert {name: getattr(params, name) for name in settings} == settings
        refused = await client.post(RESPONSES, json={"input": "hello", "top_k": -2})
        assert refused.json()["error"]["param"] == "top_k"


async def test_responses_take_variables_of_the_template() -> None:
    backend = fake_backend("hello")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ mood }}"
    async with http_client(make_app(backend, template=template)) as client:
        body = {"input": "hello", "chat_template_kwargs": {"mood": " fine"}}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
        assert TOKENIZER.decode(backend.submitted[0].prompt) == "hello fine"
        refused = await client.post(RESPONSES, json={"input": "hello", "chat_template_kwargs": {"messages": []}})
        assert refused.json()["error"]["param"] == "chat_template_kwargs.messages"
