"""The arithmetic behind the engine's figures."""

from __future__ import annotations

import pytest

from kvrelay.bench.engine import scenario as engine
from kvrelay.bench.engine.scenario import Round, summarise
from kvrelay.bench.engine.work import Limits, attention_flops, decode_work, head_weights, layer_weights, prefill_work
from kvrelay.bench.harness.report import percentile
from kvrelay.checkpoint.rope import RopeSpec
from kvrelay.checkpoint.spec import ModelSpec

SMOLLM2 = ModelSpec(
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=100000.0),
    tie_word_embeddings=True,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    max_position_embeddings=8192,
    bos_token_id=1,
    eos_token_ids=(2,),
)
LIMITS = Limits(bytes_per_s=30e9, flops_per_s=70e9)


def test_weights_of_smollm2_are_those_of_its_card() -> None:
    assert layer_weights(SMOLLM2) + head_weights(SMOLLM2) == pytest.approx(134.5e6, rel=0.001)


def test_decode_of_one_sequence_is_limited_by_memory_and_of_many_by_arithmetic() -> None:
    one, many = (decode_work(SMOLLM2, batch, 128, 4) for batch in (1, 64))
    assert one.roofline_s(LIMITS) == pytest.approx((one.weight_bytes + one.kv_bytes) / 30e9)
    assert many.roofline_s(LIMITS) == pytest.approx(many.flops / 70e9)
    assert many.weight_bytes == one.weight_bytes
    assert many.kv_bytes == 64 * one.kv_bytes == 64 * 128 * 2 * 30 * 3 * 64 * 4


def test_prefill_runs_the_head_once() -> None:
    short, long = (prefill_work(SMOLLM2, tokens, 4) for tokens in (1, 101))
    assert long.flops - short.flops == 100 * 2 * layer_weights(SMOLLM2)


def test_figures_are_medians_of_the_ratios_of_each_round() -> None:
    """A round in which the whole machine was slow changes the times but no ratio."""
    weights_s = (layer_weights(SMOLLM2) + head_weights(SMOLLM2)) * 4 / LIMITS.bytes_per_s
    rounds = [_round(slowness, 1.2 * weights_s) for slowness in (1.0, 3.0, 2.0)]
    results = summarise(SMOLLM2, rounds)
    assert results["decode_b1_over_weights_read"] == pytest.approx(1.2)
    assert results["decode_ms_b1"] == pytest.approx(2 * 1.2 * weights_s * 1e3)
    assert results["decode_best_ms_b1"] == pytest.approx(0.9 * 1.2 * weights_s * 1e3)
    assert results["faster_than_transformers_b16"] == pytest.approx(2.0)
    assert results["prefill_512_gemm_share"] == pytest.approx(0.8)
    assert results["prefill_2048_gemm_share"] == pytest.approx(0.6)
    assert set(engine.TARGETS) <= set(results)


def test_without_a_peer_nothing_is_said_about_it() -> None:
    this = _round(1.0, 0.02)
    this.peer_decode_s, this.peer_prefill_s = {}, 0.0
    assert not any("transformers" in name for name in summarise(SMOLLM2, [this]))


def _round(slowness: float, decode_s: float) -> Round:
    prefill_s = prefill_work(SMOLLM2, engine.PREFILL_TOKENS, 4).flops / LIMITS.flops_per_s / 0.8
    long_flops = prefill_work(SMOLLM2, 2048, 4).flops + attention_flops(SMOLLM2, 2048)
    long_prefill_s = long_flops / LIMITS.flops_per_s / 0.6
    return Round(
        Limits(bytes_per_s=LIMITS.bytes_per_s / slowness, flops_per_s=LIMITS.flops_per_s / slowness),
        decode_s=dict.fromkeys(engine.BATCHES, decode_s * slowness),
        best_decode_s=dict.fromkeys(engine.BATCHES, 0.9 * decode_s * slowness),
        prefill_s=prefill_s * slowness,
        long_prefill_s=long_prefill_s * slowness,
        peer_decode_s=dict.fromkeys(engine.BATCHES, 2 * decode_s * slowness),
        peer_prefill_s=3 * prefill_s * slowness,
    )


@pytest.mark.parametrize(("share", "expected"), [(50, 5.0), (99, 10.0), (100, 10.0), (1, 1.0), (90, 9.0)])
def test_percentiles(share: int, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], share) == expected


def test_no_two_prompts_begin_alike() -> None:
    prompts = engine.prompts(64)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {engine.CONTEXT + 1}
