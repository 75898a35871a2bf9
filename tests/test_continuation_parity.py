"""A child that inherits its parent's KV, with the real runner: the tokens are transformers' for the whole text, also when the
KV was on the host in between."""

from __future__ import annotations

import random

import pytest
from parity import assert_parity, reference_tokens
from test_parity import DEVICES, make_engine
from tiny_models import VOCAB_SIZE, reference_model

from kvrelay.engine.engine import Engine
from kvrelay.ids import KeptId, new_kept_id, new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Failure, Keep, KeptNews, Submit, of_kind

BLOCK = 16
LENGTHS = (32, 33, 34)  # parents whose KV ends one token before, on, and behind the edge of a block
CASES = [
    ("llama", "device", 512),
    ("qwen3", "host", 7),
    *(pytest.param(name, tier, 7, marks=pytest.mark.long) for name, tier in (("qwen3", "device"), ("llama", "host"))),
]


def generate(engine: Engine, prompt: list[int], count: int, *, keep: KeptId | None, inherit: KeptId | None) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count)
    kept = None if keep is None else Keep([keep], 600.0)
    request_id = new_request_id()
    engine.submit(Submit(request_id=request_id, external_id="", prompt=prompt, params=params, keep=kept, inherit=inherit))
    tokens: list[int] = []
    while engine.has_work:
        step = engine.step()
        assert not of_kind(Failure, step.news)
        assert all(news.kept for news in of_kind(KeptNews, step.news))
        tokens += [token for output in step.outputs for token in output.tokens]
    return tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "tier", "chunk"), CASES)
def test_a_child_gives_the_tokens_of_the_whole_text(name: str, tier: str, chunk: int, device: str) -> None:
    engine = make_engine(name, device, block_size=BLOCK, token_budget=chunk, swap_blocks=32, swap_timeout_s=60.0, kv_blocks=24)
    rng = random.Random(3)
    for length in LENGTHS:
        parent, child = new_kept_id(), new_kept_id()
        text = [rng.randrange(3, VOCAB_SIZE) for _ in range(length - 5)]
        text += generate(engine, text, 5, keep=parent, inherit=None)
        leave(engine, tier)
        for inherit, keep in ((parent, child), (child, None)):
            text += [rng.randrange(3, VOCAB_SIZE) for _ in range(3)]
            computed = engine.load().prompt_tokens
            tokens = generate(engine, text, 6, keep=keep, inherit=inherit)
            assert_parity(tokens, *reference_tokens(reference_model(name), text, 6), f"{name} {length}")
            assert engine.load().prompt_tokens - computed == 3 + 1
            text += tokens
            leave(engine, tier)
        engine.release_kept([parent, child])
    assert engine.load().blocks.pinned == 0
    assert engine.load().inherited_tokens > 0
    engine.close()


def leave(engine: Engine, tier: str) -> None:
    """To the host, and out of the device's cache."""
    if tier == "host":
        engine.core.kept.blocks.make_room(engine.kv.pool.num_blocks)
        while engine.has_work:
            engine.step()
        assert engine.load().blocks.pinned == 0
        blocks = engine.kv.pool.allocate(engine.kv.pool.num_available)
        assert blocks is not None
        engine.kv.pool.release(blocks)
