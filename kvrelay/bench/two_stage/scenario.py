"""`kvrelay bench two-stage`: think, then continue from the thought with a wide beam, as recommenders do.

    stage 1   a prompt of 500 tokens, 200 tokens of thinking
    stage 2   prompt + thinking + a suffix of 5 tokens: a beam search, 32 wide and 3 tokens long

Stage 2 is asked for in four ways: as a new prompt that no cache has, after every stage 1 (`sequential`) or each after its own
(`pipelined`); as a new prompt of which the prefix cache may have most (`prefix_cache`); as a continuation whose KV was kept
(`continuation`). Each way runs on the same server with a cache salt of its own, so that none finds what another left.

Then a burst of other traffic passes, as much as the workers' pools hold. When it has ended and the workers copy nothing any
more, neither to the host nor back, stage 2 is asked for again (`_pressure`). The burst needs the blocks of kept KV too, which
therefore moves to the host; that it did is counted. At rest it is cached on the device again; a continuation that comes at once
(`_at_once`) waits for its copy. Time to first token is that of a greedy answer of two tokens, alone on the server, for a parent
not searched from; of kept KV, after a burst each.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import pathlib
import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta
from rich.console import Console
from rich.status import Status

from kvrelay.bench.harness.plot import Bars, write_plot
from kvrelay.bench.harness.report import Target, median_ratio
from kvrelay.bench.harness.scenario import ModelBench, Part, Results, Scenario
from kvrelay.bench.harness.server import Server, serve
from kvrelay.bench.harness.workload import draw
from kvrelay.bench.two_stage.client import Answer, Handle, Timed, TwoStageClient, open_client
from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import Positive
from kvrelay.errors import BenchError

Way = Literal["sequential", "pipelined", "prefix_cache", "continuation"]
WAYS: tuple[Way, ...] = ("sequential", "pipelined", "prefix_cache", "continuation")

TARGETS = {
    "ttft_reprefill_over_continuation": Target(">=", 50.0),
    "ttft_continuation_pressure_over_calm": Target("<=", 1.2),
    "separate_requests_over_beam": Target(">=", 3.0),
    "identical_outputs": Target(">=", 1.0),
    "leases_kept": Target(">=", 1.0),
    "kept_share_moved": Target(">=", 1.0),
}
_BLOCK_SIZE = 16
_KEEP_S = 1800
_SHOWN_CANDIDATES = 20  # as many as the API shows
_TIE = 1e-3  # total logprobs so close are a tie: which of them is listed first depends on how a batch was cut
_BURST_OUTPUT = 8  # tokens of one of its requests
_SEARCHES = 3  # against their beams as single requests
_SAMPLES = 5  # of each way's time to first token, calm and after a burst
_CACHED: frozenset[Way] = frozenset(
    {"prefix_cache", "continuation"}
)  # of what a burst takes away, so that each sample needs one
_PRESS_PROMPT = 4  # tokens, so few that the worker that generates computes them


class TwoStageBench(ModelBench, frozen=True, kw_only=True):
    """Sizes of the workload."""

    requests: Annotated[Positive, Meta(description="requests of each way, besides one whose time to first token is taken")] = 2
    prompt_tokens: Annotated[Positive, Meta(description="tokens of a prompt")] = 500
    thinking_tokens: Annotated[Positive, Meta(description="tokens of stage 1")] = 200
    suffix_tokens: Annotated[Positive, Meta(description="tokens between the stages")] = 5
    beam_width: Annotated[Positive, Meta(description="beams of stage 2")] = 32
    beam_tokens: Annotated[Positive, Meta(description="tokens of stage 2")] = 3
    plot: Annotated[str, Meta(description="file of the drawing")] = "build/two-stage.svg"

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.thinking_tokens + self.suffix_tokens + max(self.beam_tokens, _BURST_OUTPUT)

    @property
    def burst_tokens(self) -> int:
        """Of one of its prompts."""
        return (self.prompt_tokens + self.thinking_tokens) // 2

    @property
    def kept_blocks(self) -> int:
        """Of all parents of one way."""
        return (self.requests + 1) * _blocks(self.prompt_tokens + self.thinking_tokens)

    @property
    def pool_blocks(self) -> int:
        """As few as hold all kept KV, and beside it every search at once and a thought, since a burst has to fill them."""
        search = _blocks(self.longest) + (self.beam_width - 1) * (_blocks(self.beam_tokens) + 1)
        return self.kept_blocks + self.requests * search + _blocks(self.longest) + 4

    @property
    def press_tokens(self) -> int:
        """Of each of `beam_width` samples which together leave no room for any kept KV."""
        return min((self.pool_blocks - 2) // self.beam_width * _BLOCK_SIZE, self.longest) - _PRESS_PROMPT

    def settings(self) -> dict[str, object]:
        """Of the server."""
        return {
            "kv-blocks": self.pool_blocks,
            "block-size": _BLOCK_SIZE,
            "max-model-len": self.longest,
            "max-batch": max(8, self.requests * self.beam_width),
            "kept-kv-share": f"{(self.kept_blocks + 1) / self.pool_blocks:.4f}",
        }


def _blocks(num_tokens: int) -> int:
    return math.ceil(num_tokens / _BLOCK_SIZE)


@dataclass(slots=True)
class Parent:
    """A request after stage 1."""

    user: int
    tokens: list[int]
    handle: Handle | None


@dataclass(slots=True)
class Outcome:
    """Of one way, calm or under pressure. `beams` by user."""

    ttft_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    prefilled_tokens: list[int] = field(default_factory=list)  # of the searches
    probed_tokens: list[int] = field(default_factory=list)  # the same of those whose time to first token was taken
    evictions: int = 0
    beams: dict[int, Answer] = field(default_factory=dict)
    from_kept_kv: list[bool] = field(default_factory=list)  # of the searches
    kept_on_device: list[int] = field(default_factory=list)  # blocks of kept KV, before each probe


def measure(options: TwoStageBench, console: Console) -> Results:
    model = options.local_model()
    bench = TwoStageRun(options, read_spec(pathlib.Path(model.model)).vocab_size)
    with (
        console.status("starting 1 prefill and 1 decode worker") as status,
        serve(model, options.settings(), prefill=1, decode=1) as server,
    ):
        asyncio.run(bench.run(server, status))
    write_plot(pathlib.Path(options.plot), panels(bench.calm, bench.pressed))
    console.print(f"wrote {options.plot}")
    return bench.summarise()


def panels(calm: dict[str, Outcome], pressed: dict[str, Outcome]) -> list[Bars]:
    both = {"calm": calm, "after a burst of other traffic": pressed}
    ttft_ms = {name: {way: statistics.median(one.ttft_s) * 1e3 for way, one in each.items()} for name, each in both.items()}
    wall_s = {name: {way: one.wall_s for way, one in each.items()} for name, each in both.items()}
    return [
        Bars("Stage 2: time to first token, ms (logarithmic)", ttft_ms, logarithmic=True),
        Bars("Both stages: wall time, s", wall_s, logarithmic=False),
    ]


class TwoStageRun:
    """What was asked for, and what came of it."""

    def __init__(self, work: TwoStageBench, vocab_size: int) -> None:
        self._work = work
        self._vocabulary = range(vocab_size)
        self._salts = itertools.count()
        self._bursts = itertools.count()
        self._status: Status
        self._server: TwoStageClient
        self.calm: dict[str, Outcome] = {}
        self.pressed: dict[str, Outcome] = {}
        self.at_once = Outcome()  # continuations that come when a burst has just ended
        self.separate_s: list[float] = []
        self.together_s: list[float] = []

    async def run(self, server: Server, status: Status) -> None:
        self._status = status
        async with open_client(server) as self._server:
            await self._server.ask({"prompt": self._draw("warm up", self._work.prompt_tokens), "max_tokens": 8})
            for number, way in enumerate(WAYS, 1):
                await self._run_way(way, f"{number} of {len(WAYS)}: {way}")

    async def _run_way(self, way: Way, title: str) -> None:
        self._status.update(f"{title}: stage 1 and 2")
        calm = self.calm[way] = Outcome()
        parents, before = await self._both_stages(way, calm), self._server.num_evictions
        probed = parents.pop()
        await self._probe(way, probed, calm, _SAMPLES)
        if way == "continuation":
            self._status.update(f"{title}: one search, and the same by single requests")
            await self._compare_search(parents[0])
        pressed = self.pressed[way] = Outcome()
        num_bursts = _SAMPLES if way in _CACHED else 1
        for burst in range(num_bursts):
            self._status.update(f"{title}: a burst of other traffic")
            await self._burst()
            await self._server.rest()
            if burst == 0:
                pressed.evictions = self._server.num_evictions - before
            await self._probe(way, probed, pressed, _SAMPLES // num_bursts)
        if way == "continuation":
            for _ in range(_SAMPLES):
                await self._burst()
                await self._time_first_token(way, probed, self.at_once)
            await self._server.rest()
        self._status.update(f"{title}: stage 2 again")
        began_at = time.perf_counter()
        await asyncio.gather(*(self._search(way, parent, pressed) for parent in parents))
        pressed.wall_s = self._stage_1_s + time.perf_counter() - began_at
        handles = [parent.handle for parent in (*parents, probed) if parent.handle is not None]
        await self._server.release(handles)

    # The stages

    async def _both_stages(self, way: Way, outcome: Outcome) -> list[Parent]:
        """The last parent is only thought about."""
        began_at, before = time.perf_counter(), self._server.num_evictions
        num_users = self._work.requests + 1
        all_thought, ends_s = asyncio.Barrier(num_users), []

        async def both(user: int) -> Parent:
            parent = await self._think(way, user)
            ends_s.append(time.perf_counter())
            if way == "sequential":
                await all_thought.wait()
            if user < self._work.requests:
                await self._search(way, parent, outcome)
            return parent

        parents = await asyncio.gather(*map(both, range(num_users)))
        self._stage_1_s = max(ends_s) - began_at
        outcome.wall_s = time.perf_counter() - began_at
        outcome.evictions = self._server.num_evictions - before
        return parents

    async def _think(self, way: Way, user: int) -> Parent:
        prompt = self._draw(f"user {user}", self._work.prompt_tokens)
        keep: dict[str, Any] = {"keep_kv": _KEEP_S} if way == "continuation" else {}
        timed = await self._server.ask(
            {"prompt": prompt, "max_tokens": self._work.thinking_tokens, "temperature": 0, "cache_salt": way, **keep}
        )
        choice = timed.answer.choices[0]
        if keep and choice.continuation is None:
            raise BenchError("the server says nothing of what it was asked to keep")
        return Parent(user, [*prompt, *choice.token_ids], choice.continuation)

    async def _search(self, way: Way, parent: Parent, outcome: Outcome) -> Timed:
        timed = await self._server.ask({**self._stage_2(way, parent), **self._beam_fields()})
        outcome.prefilled_tokens.append(timed.answer.usage.prefilled)
        outcome.beams[parent.user] = timed.answer
        outcome.from_kept_kv.append(timed.answer.is_from_kept_kv)
        return timed

    async def _probe(self, way: Way, parent: Parent, outcome: Outcome, repeats: int) -> None:
        """A prompt that no cache is to have gets a salt of its own each time; a continuation leaves nothing behind."""
        await self._server.rest()
        outcome.kept_on_device.append(await self._server.num_pinned_blocks())
        for _ in range(repeats):
            await self._time_first_token(way, parent, outcome)

    async def _time_first_token(self, way: Way, parent: Parent, outcome: Outcome) -> None:
        fields = {"max_tokens": 2, "temperature": 0}  # of one token alone, a decode worker would not be asked
        seconds, prefilled = await self._server.first_token({**self._stage_2(way, parent), **fields})
        outcome.ttft_s.append(seconds)
        outcome.probed_tokens.append(prefilled)

    def _stage_2(self, way: Way, parent: Parent, added: tuple[int, ...] = ()) -> dict[str, Any]:
        suffix = [*self._draw("suffix", self._work.suffix_tokens), *added]
        if way == "continuation":
            assert parent.handle is not None
            return {"continuation_of": parent.handle.id, "continuation_token_ids": suffix, "cache_salt": way}
        salt = way if way == "prefix_cache" else f"alone {next(self._salts)}"
        return {"prompt": [*parent.tokens, *suffix], "cache_salt": salt}

    def _beam_fields(self) -> dict[str, Any]:
        work = self._work
        return {"use_beam_search": True, "beam_width": work.beam_width, "n": work.beam_width, "max_tokens": work.beam_tokens}

    # Around them

    async def _burst(self) -> None:
        """Prompts that no cache has, as many as fill every block of both workers one after the other, and a request that fills
        the decode worker's at once. Nothing of them is left running."""
        number = next(self._bursts)
        count = math.ceil(self._work.pool_blocks / (self._work.burst_tokens // _BLOCK_SIZE))  # full blocks are what caches hold
        prompts = [self._draw(f"burst {number} {index}", self._work.burst_tokens) for index in range(count)]
        await asyncio.gather(*(self._server.ask({"prompt": prompt, "max_tokens": _BURST_OUTPUT}) for prompt in prompts))
        await self._press()

    async def _press(self) -> None:
        """A request that needs the blocks of the worker that generates for itself, nearly all at once."""
        prompt = self._draw("press", _PRESS_PROMPT)
        samples = {"n": self._work.beam_width, "max_tokens": self._work.press_tokens, "temperature": 1.0, "seed": 1}
        await self._server.ask({"prompt": prompt, **samples})

    async def _compare_search(self, parent: Parent) -> None:
        """A search against its beams as single requests, a step at a time: those that lead to its results, and others, so that
        they are as many as the search has. Both continue from the same KV."""
        scratch = Outcome()
        for _ in range(_SEARCHES):
            timed = await self._search("continuation", parent, scratch)
            self.together_s.append(timed.seconds)
            found = [tuple(choice.token_ids) for choice in timed.answer.choices]
            began_at = time.perf_counter()
            for length in range(self._work.beam_tokens):
                beams = dict.fromkeys(tokens[:length] for tokens in found)
                others = (tuple(self._draw(f"beam {index}", length)) for index in range(self._work.beam_width if length else 0))
                beams.update(itertools.islice(((beam, None) for beam in others), max(0, self._work.beam_width - len(beams))))
                await asyncio.gather(*(self._extend(parent, beam) for beam in beams))
            self.separate_s.append(time.perf_counter() - began_at)

    async def _extend(self, parent: Parent, beam: tuple[int, ...]) -> None:
        fields = {"max_tokens": 1, "temperature": 0, "logprobs": _SHOWN_CANDIDATES}
        await self._server.ask({**self._stage_2("continuation", parent, beam), **fields})

    def _draw(self, name: str, count: int) -> list[int]:
        return draw(name, count, self._vocabulary)

    # Figures

    def summarise(self) -> Results:
        def ttft_s(outcomes: dict[str, Outcome], way: str) -> float:
            return statistics.median(outcomes[way].ttft_s)

        calm, pressed = self.calm, self.pressed
        results = {
            "ttft_samples": float(_SAMPLES),
            "ttft_reprefill_over_continuation": ttft_s(calm, "sequential") / ttft_s(calm, "continuation"),
            "ttft_continuation_pressure_over_calm": ttft_s(pressed, "continuation") / ttft_s(calm, "continuation"),
            "ttft_prefix_cache_pressure_over_calm": ttft_s(pressed, "prefix_cache") / ttft_s(calm, "prefix_cache"),
            "ttft_ms_continuation_at_once": statistics.median(self.at_once.ttft_s) * 1e3,
            "ttft_continuation_at_once_over_calm": statistics.median(self.at_once.ttft_s) / ttft_s(calm, "continuation"),
            "beam_samples": float(len(self.together_s)),
            "separate_requests_over_beam": median_ratio(self.separate_s, self.together_s),
            "identical_outputs": self.identical_share(),
            "kept_blocks_moved": self.num_moved,
            "kept_share_moved": self.num_moved / self._work.kept_blocks,
            "leases_kept": statistics.mean([*calm["continuation"].from_kept_kv, *pressed["continuation"].from_kept_kv]),
        }
        for suffix, outcomes in (("", calm), ("_pressure", pressed)):
            for way, outcome in outcomes.items():
                results[f"ttft_ms_{way}{suffix}"] = ttft_s(outcomes, way) * 1e3
                results[f"ttft_prefilled_tokens_{way}{suffix}"] = statistics.mean(outcome.probed_tokens)
                results[f"wall_s_{way}{suffix}"] = outcome.wall_s
                results[f"prefilled_tokens_{way}{suffix}"] = statistics.mean(outcome.prefilled_tokens)
                results[f"evictions_{way}{suffix}"] = outcome.evictions
        return results

    @property
    def num_moved(self) -> int:
        """Blocks of kept KV that were on the device, and after no burst were."""
        return min(self.calm["continuation"].kept_on_device) - max(self.pressed["continuation"].kept_on_device)

    def identical_share(self) -> float:
        """Of all searches after the first way's."""
        expected = self.calm["sequential"].beams
        others = [outcome.beams for outcomes in (self.calm, self.pressed) for outcome in outcomes.values()][1:]
        same = [is_same(expected[user], beams[user]) for beams in others for user in expected]
        return sum(same) / len(same)


def is_same(one: Answer, other: Answer) -> bool:
    """The same results in the same order, but for ties."""
    pairs = list(zip(one.choices, other.choices, strict=True))
    if any(abs(left.cumulative_logprob - right.cumulative_logprob) > _TIE for left, right in pairs):
        return False
    left_scores = {tuple(choice.token_ids): choice.cumulative_logprob for choice in one.choices}
    worst = min(left_scores.values())
    return all(
        abs(left_scores.get(tuple(choice.token_ids), worst) - choice.cumulative_logprob) <= _TIE for choice in other.choices
    )


SCENARIO = Scenario(TwoStageBench, {"two-stage": Part("both stages, in each way", measure, TARGETS)})
