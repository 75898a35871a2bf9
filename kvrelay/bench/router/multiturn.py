"""What choosing workers by their caches is worth: conversations of several turns on 2 prefill and 2 decode workers.

    turn 1   system prompt + question                       no worker has it
    turn 2   system prompt + question + answer + question   the workers of turn 1 have nearly all of it
    ...

Every worker's cache holds more than half of the conversations, but not all: a cluster that sends each of them where it has been
before has them all in its caches, one that sends them anywhere has not. Both policies run on the same worker processes, in
turns; every run has conversations of its own, so nothing is left for it in a cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from kvrelay.bench.harness.cluster import Answer, ask, live_cluster
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import ModelBench, Part, Results
from kvrelay.bench.harness.workload import draw, greedy
from kvrelay.config import ClusterOptions, EngineOptions, ModelOptions
from kvrelay.router.policy import PolicyName
from kvrelay.router.router import Router

ROUNDS = 2
CONVERSATIONS = 8
TURNS = 4
SYSTEM_TOKENS = 416
QUESTION_TOKENS = 32
ANSWER_TOKENS = 8
IN_FLIGHT = 3  # requests at once: one for each prefill worker, and one that waits
POLICIES: tuple[PolicyName, ...] = ("prefix_aware", "round_robin")
_BLOCK_SIZE = 16
_WARM_UP_TOKENS = 128


@dataclass(slots=True)
class Conversation:
    """What was said so far, as tokens."""

    history: list[int]
    random: random.Random
    vocabulary: range

    def question(self) -> list[int]:
        """The next prompt."""
        self.history += draw(self.random, QUESTION_TOKENS, self.vocabulary)
        return self.history

    def answered(self, tokens: Sequence[int]) -> None:
        self.history += tokens


def measure(options: ModelBench, console: Console) -> Results:
    return asyncio.run(_measure(options.local_model(), console))


async def _measure(model: ModelOptions, console: Console) -> Results:
    answers: dict[PolicyName, list[Answer]] = {policy: [] for policy in POLICIES}
    with console.status("starting 2 prefill and 2 decode workers") as status:
        engine = EngineOptions(block_size=_BLOCK_SIZE, kv_blocks=pool_blocks(), max_model_len=longest_tokens() + _BLOCK_SIZE)
        async with live_cluster(model, engine, ClusterOptions(prefill=2, decode=2), POLICIES[0]) as cluster:
            routers = {POLICIES[0]: cluster.router, POLICIES[1]: await cluster.add_router(POLICIES[1])}
            await _warm_up(routers[POLICIES[1]], cluster.vocabulary)
            runs = [(number, policy) for number in range(ROUNDS) for policy in POLICIES]
            for done, (number, policy) in enumerate(runs):
                status.update(f"run {done + 1} of {len(runs)}: {policy}")
                answers[policy] += await _converse(routers[policy], f"{number} {policy}", number, cluster.vocabulary)
    return summarise(answers)


def longest_tokens() -> int:
    """Of a conversation at its end."""
    return SYSTEM_TOKENS + TURNS * (QUESTION_TOKENS + ANSWER_TOKENS)


def pool_blocks() -> int:
    """For two thirds of the conversations, so that it does not matter if they are not spread quite evenly."""
    per_conversation = -(-longest_tokens() // _BLOCK_SIZE)
    return (2 * CONVERSATIONS // 3) * per_conversation + per_conversation // 2


async def _warm_up(router: Router, vocabulary: range) -> None:
    """In turns, so every worker computes once before anything is measured."""
    source = random.Random("warm up")
    prompts = [draw(source, _WARM_UP_TOKENS, vocabulary) for _ in range(4)]
    for answer in await asyncio.gather(*(ask(router, prompt, greedy(ANSWER_TOKENS)) for prompt in prompts)):
        _ = answer.ttft_s  # raises if it failed


async def _converse(router: Router, name: str, number: int, vocabulary: range) -> list[Answer]:
    """Turn by turn, the conversations in an order drawn anew each time: users do not take turns."""
    shuffler = random.Random(number)  # the same for both policies
    conversations = [_begin(f"{name} {index}", vocabulary) for index in range(CONVERSATIONS)]
    room = asyncio.Semaphore(IN_FLIGHT)
    answers: list[Answer] = []
    for _ in range(TURNS):
        shuffler.shuffle(conversations)
        answers += await asyncio.gather(*(_turn(router, conversation, room) for conversation in conversations))
    return answers


def _begin(name: str, vocabulary: range) -> Conversation:
    source = random.Random(name)
    return Conversation(draw(source, SYSTEM_TOKENS, vocabulary), source, vocabulary)


async def _turn(router: Router, conversation: Conversation, room: asyncio.Semaphore) -> Answer:
    async with room:
        answer = await ask(router, list(conversation.question()), greedy(ANSWER_TOKENS))
    conversation.answered(answer.tokens)
    return answer


def summarise(answers: dict[PolicyName, list[Answer]]) -> Results:
    ttft_s = {policy: [answer.ttft_s for answer in those] for policy, those in answers.items()}
    p50 = {policy: percentile(times, 50) for policy, times in ttft_s.items()}
    results = {
        "multiturn_ttft_p50_ratio": p50["round_robin"] / p50["prefix_aware"],
        "multiturn_samples": float(min(map(len, ttft_s.values()))),
    }
    for policy, those in answers.items():
        cached, total = sum(each.cached_tokens for each in those), sum(each.num_prompt_tokens for each in those)
        results[f"multiturn_ttft_ms_p50_{policy}"] = p50[policy] * 1e3
        results[f"multiturn_ttft_ms_p99_{policy}"] = percentile(ttft_s[policy], 99) * 1e3
        results[f"multiturn_cached_share_{policy}"] = cached / total
    return results


PART = Part("choosing by caches against choosing in turn", measure, {"multiturn_ttft_p50_ratio": Target(">=", 2.0)})
