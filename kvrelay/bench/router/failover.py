"""What a client notices when a decode worker is killed: streams on 2 prefill and 2 decode workers, and one kill -9 a round.

    streams run -> kill -9 of the busiest decode worker -> the router finds out -> its streams go on elsewhere
                   |<------ detection ------------------->|                         |
                   |<------ next token of each of its streams --------------------->|

Once with prompts that the prefill workers have in their caches (`failover_...`), and once without a prefix cache, so that each
stream's prompt and tokens are computed again (`failover_uncached_...`). Afterwards, on the quiet cluster: the time of a prompt
of that length that no cache has, and every stream again, undisturbed, to compare all its tokens with.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from dataclasses import dataclass

import msgspec
from rich.console import Console

from kvrelay.bench.harness.cluster import Answer, LiveCluster, ask, finish, live_cluster, start, wait_until
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import ModelBench, Part, Results
from kvrelay.bench.harness.workload import greedy
from kvrelay.config import ClusterOptions, EngineOptions, ModelOptions
from kvrelay.errors import BenchError
from kvrelay.router.router import Router
from kvrelay.sampling import SamplingParams

ROUNDS = 2
STREAMS = 8
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 96
TOKENS_BEFORE = 8  # every stream has so many when the worker is killed
PREFILLS = 2  # per round
_START_S = 60.0  # for all streams to run
_DETECT_S = 60.0
# Room for all streams on one decode worker.
_ENGINE = EngineOptions(kv_blocks=512, max_model_len=2048)


@dataclass(frozen=True)
class Kind:
    """Without caches streams begin one prompt after the other, so that there are fewer and they are longer."""

    prefix: str
    engine: EngineOptions
    num_streams: int
    output_tokens: int


KINDS = (
    Kind("failover", _ENGINE, STREAMS, OUTPUT_TOKENS),
    Kind("failover_uncached", msgspec.structs.replace(_ENGINE, prefix_cache=False), STREAMS // 2, 3 * OUTPUT_TOKENS),
)


@dataclass(frozen=True)
class Struck:
    """One round, in seconds."""

    detected_s: float  # from the kill to the moment the router did not count on the worker any more
    next_token_s: list[float]  # from the kill, for each stream of the killed worker
    prefill_s: list[float]  # prompts of that length
    num_right: int  # streams with the tokens of the undisturbed run
    num_streams: int
    problems: list[str]


def measure(options: ModelBench, console: Console) -> Results:
    return asyncio.run(_measure(options.local_model(), console))


async def _measure(model: ModelOptions, console: Console) -> Results:
    results: Results = {}
    for kind in KINDS:
        results |= await _measure_kind(model, kind, console)
    return results


async def _measure_kind(model: ModelOptions, kind: Kind, console: Console) -> Results:
    rounds: list[Struck] = []
    with console.status("starting 2 prefill and 2 decode workers") as status:
        async with live_cluster(model, kind.engine, ClusterOptions(prefill=2, decode=2)) as cluster:
            for number in range(ROUNDS):
                status.update(f"round {number + 1} of {ROUNDS}: kill -9 under {kind.num_streams} streams")
                rounds.append(await _round(cluster, kind))
    for problem in sorted({problem for each in rounds for problem in each.problems}):
        console.print(f"[yellow]a stream failed:[/] {problem}", highlight=False, soft_wrap=True)
    return summarise(rounds, kind.prefix)


async def _round(cluster: LiveCluster, kind: Kind) -> Struck:
    await cluster.until_whole()
    prompts = [cluster.draw(PROMPT_TOKENS) for _ in range(kind.num_streams)]
    if kind.engine.prefix_cache:
        await _prefill(cluster.router, prompts)
    params = [_params(index, kind.output_tokens) for index in range(kind.num_streams)]
    answers = [start(cluster.router, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    await wait_until(lambda: all(_under_way(answer, kind) for answer in answers), "all streams run", _START_S)
    killed_at, detected_at, struck = await _strike(cluster, answers)
    await asyncio.gather(*(finish(answer) for answer in answers))
    await cluster.until_whole()
    num_tokens = PROMPT_TOKENS + round(statistics.median(struck.values()))
    prefills = [(await ask(cluster.router, cluster.draw(num_tokens), greedy(2))).ttft_s for _ in range(PREFILLS)]
    again = await asyncio.gather(*(ask(cluster.router, prompt, one) for prompt, one in zip(prompts, params, strict=True)))
    return Struck(
        detected_s=detected_at - killed_at,
        next_token_s=[answer.tokens_at[had] - killed_at for answer, had in struck.items() if had < len(answer.tokens)],
        prefill_s=prefills,
        num_right=sum(not one.problem and one.tokens == other.tokens for one, other in zip(answers, again, strict=True)),
        num_streams=kind.num_streams,
        problems=[answer.problem for answer in [*answers, *again] if answer.problem],
    )


async def _prefill(router: Router, prompts: list[list[int]]) -> None:
    """So that all streams begin together, not one prefill after the other. Where a prompt is computed, it is cached anyway."""
    for answer in await asyncio.gather(*(ask(router, prompt, greedy(1)) for prompt in prompts)):
        _ = answer.ttft_s  # raises if it failed


async def _strike(cluster: LiveCluster, answers: list[Answer]) -> tuple[float, float, dict[Answer, int]]:
    """When the worker was killed, when the router noticed, and its streams, each with the number of tokens it had of it."""
    victim = max((worker for worker in cluster.workers() if worker["role"] == "decode"), key=lambda worker: worker["in_flight"])
    on_victim = [answer for answer in answers if answer.decode == victim["id"]]
    if not on_victim:
        raise BenchError("no stream runs on the busiest decode worker")
    killed_at = time.perf_counter()
    os.kill(victim["pid"], signal.SIGKILL)
    router, usable = cluster.router, cluster.num_workers
    detected_at = await wait_until(lambda: router.num_usable < usable, "the router notices a killed worker", _DETECT_S)
    await asyncio.sleep(0)  # what the worker had said before is read now, by the streams that wait for it
    await asyncio.sleep(0)
    return killed_at, detected_at, {answer: len(answer.tokens) for answer in on_victim}


def _under_way(answer: Answer, kind: Kind) -> bool:
    if answer.problem or len(answer.tokens) >= kind.output_tokens:
        raise BenchError(f"a stream ended too early: {answer.problem or 'it had all its tokens'}")
    return len(answer.tokens) >= TOKENS_BEFORE


def _params(index: int, max_tokens: int) -> SamplingParams:
    """Every other stream is sampled: its random numbers must go on where they were, too."""
    if index % 2:
        return SamplingParams(temperature=0.8, seed=index, ignore_eos=True, max_tokens=max_tokens)
    return greedy(max_tokens)


def summarise(rounds: list[Struck], prefix: str = KINDS[0].prefix) -> Results:
    next_token_s = [time_s for each in rounds for time_s in each.next_token_s]
    if not next_token_s:
        raise BenchError("no stream of a killed worker got another token")
    detected_s = statistics.median(each.detected_s for each in rounds)
    prefill_s = statistics.median(time_s for each in rounds for time_s in each.prefill_s)
    p50 = percentile(next_token_s, 50)
    return {
        f"{prefix}_over_bound": p50 / (detected_s + prefill_s),
        f"{prefix}_next_token_ms_p50": p50 * 1e3,
        f"{prefix}_next_token_ms_max": max(next_token_s) * 1e3,
        f"{prefix}_detect_ms_p50": detected_s * 1e3,
        f"{prefix}_prefill_ms_p50": prefill_s * 1e3,
        f"{prefix}_struck_streams": float(len(next_token_s)),
        f"{prefix}_right_share": sum(each.num_right for each in rounds) / sum(each.num_streams for each in rounds),
    }


PART = Part(
    "kill -9 of a decode worker",
    measure,
    {
        "failover_over_bound": Target("<=", 1.0),
        "failover_right_share": Target(">=", 1.0),
        "failover_uncached_right_share": Target(">=", 1.0),
    },
)
