"""The front end with a fake backend and a tiny tokenizer: as an ASGI application, or on a real port."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import uvicorn
from patience import PATIENCE_S

from kvrelay.config import RouterOptions
from kvrelay.frontend.app import FrontEnd, create_app
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.metrics import Metrics
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import CHATML, folder_of

MODEL = "tiny"
TOKENIZER = Tokenizer.load(folder_of("byte_level"))
EOS = 2


def says(text: str) -> list[int]:
    """The tokens of an answer."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def fake_backend(answer: str | None = None, *, max_model_len: int = 512, tick_s: float = 0.0) -> FakeBackend:
    """Answers with that text, or with the prompt."""
    tokens = None if answer is None else says(answer)

    def reply(prompt: Sequence[int]) -> Sequence[int]:
        return list(prompt) if tokens is None else tokens

    return FakeBackend(
        eos_token_id=EOS, vocab_size=TOKENIZER.vocab_size, answer=reply, max_model_len=max_model_len, tick_s=tick_s
    )


def make_app(
    backend: FakeBackend, options: RouterOptions | None = None, *, template: str = CHATML, metrics: Metrics | None = None
) -> FrontEnd:
    tokenizer = TOKENIZER if template == CHATML else Tokenizer.load(folder_of("byte_level", template))
    return create_app(backend, tokenizer, metrics=metrics or Metrics(), options=options or RouterOptions(), model=MODEL)


@contextlib.asynccontextmanager
async def http_client(app: FrontEnd) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


@contextlib.contextmanager
def running_server(app: FrontEnd) -> Iterator[str]:
    """Listens on a free port in a thread; gives the URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", loop="uvloop"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def wait_until_idle(backend: FakeBackend) -> None:
    """The leak check: nothing stays open. (A stuck request fails the test by its time limit.)"""
    while backend.num_open:
        time.sleep(0.005)
