"""`kvrelay bench serve`, `slo` and `compare`: traffic from a seed, a client that sees what a server did, figures."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import msgspec
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvrelay.bench import compare
from kvrelay.bench.harness.plot import Lines, draw
from kvrelay.bench.harness.report import BenchResult
from kvrelay.bench.main import find_scenario, run
from kvrelay.bench.serve.client import Asked, Target, meet
from kvrelay.bench.serve.scenario import Traffic, figures
from kvrelay.bench.serve.sessions import KINDS, Session, Wanted, make_sessions
from kvrelay.bench.slo.scenario import SloBench
from kvrelay.errors import ConfigError

WANTED = Wanted(num_sessions=32, rate=4.0, input_tokens=64, output_tokens=16, seed=7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_traffic(kind: str) -> None:
    sessions = make_sessions(kind, WANTED)
    assert sessions == make_sessions(kind, WANTED)
    assert sessions != make_sessions(kind, replace(WANTED, seed=8))
    assert len(sessions) == WANTED.num_sessions
    assert [session.at_s for session in sessions] == sorted(session.at_s for session in sessions)


def test_kinds_of_traffic_are_what_they_say() -> None:
    assert {len(session.questions) for session in make_sessions("conversation", WANTED)} == {4}
    assert len({session.questions[0].text[:200] for session in make_sessions("long-prefix", WANTED)}) <= 4
    assert len({session.at_s for session in make_sessions("bursty", WANTED)}) == WANTED.num_sessions // 8
    lengths = [len(session.questions[0].text.split()) for session in make_sessions("mixed", WANTED)]
    assert min(lengths) < 64 < max(lengths)
    assert {session.at_s for session in make_sessions("fixed", replace(WANTED, rate=0.0))} == {0.0}


def event(**fields: object) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


async def answer(request: Request) -> Response:
    """As many tokens as asked for; how many messages there were is the prompt's length. "fail" as a text gets a 500."""
    body = msgspec.json.decode(await request.body())
    texts = [message["content"] for message in body["messages"]]
    if texts[-1] == "fail":
        return JSONResponse({"error": "[no] way"}, 500)

    async def stream() -> AsyncIterator[bytes]:
        yield event(choices=[{"delta": {"role": "assistant"}}])
        for number in range(body["max_tokens"]):
            yield event(choices=[{"delta": {"content": f"{number} "}}])
        yield event(choices=[], usage={"prompt_tokens": len(texts), "completion_tokens": body["max_tokens"]})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Target:
    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    usual = httpx.AsyncClient

    def within(**settings: object) -> httpx.AsyncClient:
        return usual(transport=httpx.ASGITransport(app), headers={"x": "y"})

    monkeypatch.setattr(httpx, "AsyncClient", within)
    return Target("http://server", "model", {}, ignore_eos=True)


async def test_a_conversation_sends_its_answers_back(server: Target) -> None:
    seen: list[Asked] = []
    asked, _ = await meet(server, make_sessions("conversation", replace(WANTED, num_sessions=1)), 0, seen.append)
    assert seen == asked
    assert [one.prompt_tokens for one in asked] == [1, 3, 5, 7]
    assert [one.output_tokens for one in asked] == [16] * 4
    assert asked[0].text.split() == [str(number) for number in range(16)]
    assert all(len(one.times) == 16 for one in asked)


async def test_what_failed_is_counted_and_not_good(server: Target, capsys: pytest.CaptureFixture[str]) -> None:
    sessions = make_sessions("fixed", replace(WANTED, num_sessions=3, rate=0.0))
    bad = Session(0.0, (replace(sessions[0].questions[0], text="fail"),))
    asked, wall_s = await meet(server, [*sessions, bad], 2, lambda _: None)
    results = figures(asked, wall_s, Traffic(ttft_ms=1e9, itl_ms=1e9), Console())
    assert (results["requests"], results["failed"], results["good_share"]) == (4, 1, 0.75)
    assert results["output_tokens_per_s"] == pytest.approx(3 * 16 / wall_s)
    assert "[no] way" in capsys.readouterr().out.replace("\n", "")


def test_an_answer_is_good_within_both_targets() -> None:
    one = Asked(sent_at=0.0, times=[0.5, 0.6, 0.7], text="abc", prompt_tokens=1, output_tokens=3)
    for ttft_ms, itl_ms, good in ((600, 110, 1), (400, 110, 0), (600, 90, 0)):
        assert figures([one], 1.0, Traffic(ttft_ms=ttft_ms, itl_ms=itl_ms), Console())["good_share"] == good


def test_serve_needs_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve"]) == 2
    assert run(["serve", "localhost"]) == 2
    assert "needs the URL of a server" in capsys.readouterr().err


@pytest.mark.parametrize("rates", ["", "1,x", "2,1", "0,1"])
def test_rates_ascend_from_above_0(rates: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        SloBench(rates=rates).ascending()


def test_curves_are_drawn() -> None:
    drawing = draw([Lines("share", {"whole": [(1, 1.0), (2, 0.5)], "1p1d": [(1, 1.0)]})])
    assert drawing.count("<polyline") == 2
    assert "whole" in drawing


def test_two_results_side_by_side(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = BenchResult(scenario="kv", commit="a" * 40, hardware="here", command="kvrelay bench kv", results={"x": 2.0, "y": 1.0})
    for name, result in (("a", one), ("b", msgspec.structs.replace(one, results={"x": 3.0, "z": 5.0}))):
        (tmp_path / name).write_bytes(msgspec.json.encode(result))
    (tmp_path / "c").write_bytes(msgspec.json.encode(msgspec.structs.replace(one, scenario="router")))
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "1.500" in capsys.readouterr().out
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert len(compare.compare(one, one).rows) == 2


def test_their_scenarios_are_found() -> None:
    assert find_scenario("serve").positional == "url"
    assert find_scenario("slo").options is SloBench
