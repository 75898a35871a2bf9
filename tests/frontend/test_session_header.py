"""The header that keeps a conversation with its workers."""

from __future__ import annotations

import pytest

from tests.frontend.serving import MODEL, fake_backend, http_client, make_app

BODIES = {
    "/v1/completions": {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 16},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_session_reaches_the_backend(path: str) -> None:
    backend = fake_backend()
    async with http_client(make_app(backend)) as client:
        for headers in ({}, {"x-session-id": "chat 7"}, {"x-session-id": ""}):
            answer = await client.post(path, json=BODIES[path], headers=headers)
            assert answer.status_code == 200, answer.text
            assert {request.session for request in backend.submitted} == {headers.get("x-session-id", "")}
            backend.submitted.clear()


@pytest.mark.parametrize("session", [b"x" * 257, b"caf\xc3\xa9", b"a\x01b"])
async def test_a_session_that_is_no_name_is_refused_by_name(session: bytes) -> None:
    backend = fake_backend()
    async with http_client(make_app(backend)) as client:
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"], headers={b"x-session-id": session})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-session-id"
    assert backend.submitted == []
