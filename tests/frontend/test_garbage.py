"""A request leaves no circles behind: its objects go with their last reference, and the garbage collector finds nothing."""

from __future__ import annotations

import gc
from typing import Any

import httpx
import pytest

from tests.frontend.serving import fake_backend, make_app, running_server

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
COMPLETION = {"prompt": "Hello", "max_tokens": 8}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_a_request_leaves_no_circles(path: str, body: dict[str, Any], stream: bool) -> None:
    with running_server(make_app(fake_backend("An answer."))) as url, httpx.Client(base_url=url) as client:
        asked = body | {"stream": stream}
        assert client.post(path, json=asked).status_code == 200
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert client.post(path, json=asked).status_code == 200
            client.get("/version")  # the server has done with the answers before it
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("kvrelay.")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []
