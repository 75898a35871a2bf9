"""KV in fp8 is handed over as it is stored."""

from __future__ import annotations

from cluster import Shape, ask, random_prompts, relay
from tiny_models import VOCAB_SIZE, tiny_model

from kvrelay.bench.gpu.requests import generate, greedily
from kvrelay.bench.harness.engine import build_engine
from kvrelay.config import EngineOptions, ModelOptions

PROMPTS = random_prompts(8, seed=23, longest=120, vocab=(3, VOCAB_SIZE))
FOLDER = str(tiny_model("kv2"))


def shape_of(tp: tuple[int, int] = (1, 1)) -> Shape:
    return Shape(
        checkpoint=FOLDER, kv_dtype="fp8", num_blocks=(96, 96), token_budget=48, max_model_len=160, block_sizes=(16, 24), tp=tp
    )


def tokens_of_one_worker() -> list[list[int]]:
    engine, _ = build_engine(
        ModelOptions(model=FOLDER, dtype="float32", threads=1, kv_dtype="fp8"),
        EngineOptions(kv_blocks=96, token_budget=48, max_model_len=160),
    )
    found = [generate(engine, [prompt], greedily(8))[0] for prompt in PROMPTS]
    engine.close()
    return found


async def test_two_workers_give_the_tokens_of_one() -> None:
    """One request at a time, so that all compute the same numbers: those that round differently are other numbers in fp8."""
    expected = tokens_of_one_worker()
    async with relay(shape_of()) as cluster:
        for index, prompt in enumerate(PROMPTS):
            cluster.use_mode("write" if index % 2 else "read")
            (answer,) = await cluster.answers([ask(prompt, max_tokens=8, ignore_eos=True)])
            assert answer.said[0][0] == expected[index]
        (decode,) = cluster.decode
        load = decode.engine.load()
        assert not load.prompt_tokens, "a decode worker computed a prompt: a hand-over failed"
        assert (load.transfers.done, load.transfers.failed) == (len(PROMPTS), 0)


async def test_ranks_hand_it_over_too() -> None:
    async with relay(shape_of((2, 1))) as cluster:
        answers = await cluster.answers(ask(prompt, max_tokens=8, ignore_eos=True) for prompt in PROMPTS)
        assert [len(answer.said[0][0]) for answer in answers] == [8] * len(PROMPTS)
        (decode,) = cluster.decode
        assert decode.engine.load().transfers.failed == 0
