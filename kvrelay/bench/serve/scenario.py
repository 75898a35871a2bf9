"""`kvrelay bench serve URL`: any OpenAI-compatible server under traffic from a seed: one client for all peers."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import uvloop
from msgspec import Meta
from rich.console import Console
from rich.markup import escape

from kvrelay.bench.harness.report import percentile
from kvrelay.bench.harness.scenario import BenchOptions, Part, Results, Scenario
from kvrelay.bench.serve.client import Asked, Target, find_model, meet
from kvrelay.bench.serve.sessions import Session, Wanted, make_sessions
from kvrelay.errors import BenchError, ConfigError
from kvrelay.launch.console import console_progress

Kind = Literal["fixed", "conversation", "long-prefix", "bursty", "mixed"]
_SHOWN_PROBLEMS = 3


class Traffic(BenchOptions, frozen=True, kw_only=True):
    """The traffic, and when an answer counts as good."""

    traffic: Annotated[Kind, Meta(description="what comes")] = "fixed"
    sessions: Annotated[int, Meta(ge=1, description="requests; conversations of four turns")] = 64
    input_tokens: Annotated[int, Meta(ge=1, description="words of a prompt, about a token each")] = 256
    output_tokens: Annotated[int, Meta(ge=1, description="tokens of an answer")] = 64
    seed: Annotated[int, Meta(description="the same seed gives the same traffic")] = 0
    ttft_ms: Annotated[float, Meta(gt=0, description="an answer is good if its first token came within this time ...")] = 1000.0
    itl_ms: Annotated[float, Meta(gt=0, description="... and its others within this time each, on average")] = 100.0

    def wanted(self, rate: float, seed: int) -> Wanted:
        return Wanted(self.sessions, rate, self.input_tokens, self.output_tokens, seed)


class ServeBench(Traffic, frozen=True, kw_only=True):
    """The server and the traffic."""

    rate: Annotated[float, Meta(ge=0, description="sessions that begin per second; 0: all at once")] = 0.0
    concurrency: Annotated[int, Meta(ge=0, description="requests on their way at most; 0: no limit")] = 16
    url: Annotated[str, Meta(description="the server, such as http://127.0.0.1:8000")] = ""
    model: Annotated[str, Meta(description="default is the first that the server lists")] = ""
    api_key: Annotated[str, Meta(description="sent as a bearer token")] = ""
    ignore_eos: Annotated[bool, Meta(description="ask for answers of full length; OpenAI itself does not know the field")] = (
        True
    )


def measure(options: ServeBench, console: Console) -> Results:
    url = options.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"bench serve needs the URL of a server, such as http://127.0.0.1:8000 (given: {options.url or 'none'})"
        )
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    target = Target(url, options.model or find_model(url, headers), headers, options.ignore_eos)
    sessions = make_sessions(options.traffic, options.wanted(options.rate, options.seed))
    asked, wall_s = run_sessions(target, sessions, options.concurrency, f"{options.traffic} traffic")
    return figures(asked, wall_s, options, console)


def run_sessions(target: Target, sessions: Sequence[Session], concurrency: int, title: str) -> tuple[list[Asked], float]:
    progress = console_progress()
    progress.start(title, sum(len(session.questions) for session in sessions), unit="requests")
    try:
        return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(
            meet(target, sessions, concurrency, lambda _: progress.advance(1))
        )
    finally:
        progress.done()


def figures(asked: Sequence[Asked], wall_s: float, traffic: Traffic, console: Console) -> Results:
    """Raises BenchError if no request was answered."""
    whole = [one for one in asked if not one.problem]
    for problem, count in Counter(one.problem for one in asked if one.problem).most_common(_SHOWN_PROBLEMS):
        console.print(f"[red]{count} failed[/]: {escape(problem)}", soft_wrap=True)
    if not whole:
        raise BenchError("no request was answered")
    gaps = [later - earlier for one in whole for earlier, later in zip(one.times, one.times[1:], strict=False)] or [0.0]
    good = [one for one in whole if is_good(one, traffic)]
    ttfts, paces = [one.ttft_s for one in whole], [one.per_token_s for one in whole]
    return {
        "requests": len(asked),
        "failed": len(asked) - len(whole),
        **{f"ttft_ms_p{share}": 1e3 * percentile(ttfts, share) for share in (50, 90, 99)},
        **{f"itl_ms_p{share}": 1e3 * percentile(gaps, share) for share in (50, 99)},
        "itl_ms_max": 1e3 * max(gaps),
        "time_per_output_token_ms_p50": 1e3 * statistics.median(paces),
        "requests_per_s": len(whole) / wall_s,
        "good_requests_per_s": len(good) / wall_s,
        "good_share": len(good) / len(asked),
        "output_tokens_per_s": sum(one.output_tokens for one in whole) / wall_s,
        "prompt_tokens_mean": statistics.mean(one.prompt_tokens for one in whole),
        "output_tokens_mean": statistics.mean(one.output_tokens for one in whole),
        "wall_s": wall_s,
    }


def is_good(one: Asked, traffic: Traffic) -> bool:
    return not one.problem and one.ttft_s * 1e3 <= traffic.ttft_ms and one.per_token_s * 1e3 <= traffic.itl_ms


SCENARIO = Scenario(ServeBench, {"serve": Part("a server under traffic", measure, {})}, positional="url")
