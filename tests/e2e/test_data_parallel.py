"""Clients address one of the workers that generate by its data parallel rank."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from patience import PATIENCE_S
from server import Server, serve
from tiny_models import tiny_model

FLAGS = ("--kv-blocks", "64", "--max-batch", "8", "--threads", "1")


def post(server: Server, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """The rank that the answer reports, and the answer."""
    body = {"max_tokens": 4, "temperature": 0, **body}
    sent = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return int(response.headers["x-data-parallel-rank"]), json.loads(response.read())


def refused(server: Server, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, body, headers)
    assert error.value.code == 400
    answer: dict[str, Any] = json.loads(error.value.read())["error"]
    return answer


def test_a_rank_is_addressed_reported_and_kept_along_a_continuation() -> None:
    with serve(str(tiny_model("llama")), "--prefill", "1", "--decode", "2", *FLAGS) as server:
        entries = server.get("/cluster")["workers"]
        ranks = {entry["id"]: entry["data_parallel_rank"] for entry in entries if entry["role"] == "decode"}
        assert sorted(ranks.values()) == [0, 1]
        for rank in (0, 1, 1, 0):
            assert post(server, {"prompt": "The quick", "data_parallel_rank": rank})[0] == rank
            assert post(server, {"prompt": "The quick brown"}, {"X-data-parallel-rank": str(rank)})[0] == rank
        for rank in (0, 1):
            parent = post(server, {"prompt": "The quick", "data_parallel_rank": rank, "request_id": f"parent-{rank}"})
            assert parent[0] == rank
            for _ in range(3):
                assert post(server, {"continuation_of": f"parent-{rank}", "continuation_suffix": " fox"})[0] == rank
        other = {"continuation_of": "parent-0", "continuation_suffix": " fox", "data_parallel_rank": 1}
        assert post(server, other)[0] == 1
        unknown = refused(server, {"prompt": "The", "data_parallel_rank": 2})
        assert unknown["param"] == "data_parallel_rank"
        assert "there is no rank 2; decode workers have 0, 1" in unknown["message"]
        assert refused(server, {"prompt": "The"}, {"X-data-parallel-rank": "one"})["param"] == "x-data-parallel-rank"
        assert refused(server, {"prompt": "The", "data_parallel_rank": 0}, {"X-data-parallel-rank": "1"})
        server.idle_workers()
