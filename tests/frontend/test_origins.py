"""Pages of other origins: what a browser is told, before the server's API keys are asked for and after."""

from __future__ import annotations

import pytest

from kvrelay.config import RouterOptions
from tests.frontend.serving import fake_backend, http_client, make_app

PAGE = "https://page.example"
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization,x-other"}


@pytest.mark.parametrize("allowed", [f"http://localhost:3000, {PAGE}", "*"])
async def test_a_page_of_an_allowed_origin_may_call(allowed: str) -> None:
    app = make_app(fake_backend("yes"), RouterOptions(allowed_origins=allowed, api_key="secret"))
    async with http_client(app) as client:
        asked = await client.options("/v1/completions", headers=ASKS)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "x-other" in asked.headers["access-control-allow-headers"]
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            headers = {"origin": PAGE, "authorization": "Bearer secret"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            ours = {name for name in answer.headers if name.startswith("x-")} - {"x-accel-buffering"}  # that is for proxies
            assert ours | {"traceparent"} <= set(exposed)
        refused = await client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] in (PAGE, "*"), "the page could not read the error"


async def test_a_page_of_another_origin_may_not() -> None:
    async with http_client(make_app(fake_backend("yes"), RouterOptions(allowed_origins="https://other.example"))) as client:
        assert (await client.options("/v1/completions", headers=ASKS)).status_code == 400
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers


async def test_without_allowed_origins_options_is_no_method() -> None:
    async with http_client(make_app(fake_backend("yes"))) as client:
        assert (await client.options("/v1/completions", headers=ASKS)).status_code == 405
