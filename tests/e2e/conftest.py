"""One SmolLM2 server for all end-to-end tests: a prefill and a decode worker, and every prompt goes through both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from server import Server, serve

if TYPE_CHECKING:
    import openai
    from collector import Collector


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    from collector import Collector

    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="session")
def smol(collector: Collector) -> Iterator[Server]:
    pool = ["--max-model-len", "2048", "--kv-blocks", "1200", "--local-prefill-tokens", "0"]
    with serve("smollm2", *pool, "--otlp-endpoint", collector.url, fresh=True) as server:
        yield server


@pytest.fixture(scope="session")
def client(smol: Server) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=smol.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def _leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "smol" in request.fixturenames:
        request.getfixturevalue("smol").idle_workers()
