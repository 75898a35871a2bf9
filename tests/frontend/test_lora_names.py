"""Every way to ask for an answer can ask for a LoRA adapter by its name."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.wire.registry import Adapter
from tests.frontend.serving import fake_backend, http_client, make_app

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ],
)
async def test_the_adapter_is_asked_for_and_named_in_the_answer(path: str, body: dict[str, Any]) -> None:
    backend = fake_backend()
    backend.adapters["sql"] = Adapter(name="sql", digest="of-sql", path="/adapters/sql")
    async with http_client(make_app(backend)) as client:
        for model in ("sql", None):
            named = {} if model is None else {"model": model}
            response = await client.post(path, json={**body, **named})
            assert response.status_code == 200, response.text
            assert backend.submitted[-1].adapter == ("of-sql" if model else "")
            assert (response.json()["model"] == "sql") is (model is not None)
    assert backend.num_open == 0
