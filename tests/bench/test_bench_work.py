"""The arithmetic behind the engine's figures."""

from __future__ import annotations

import pathlib
import sys

import pytest

from kvrelay.bench.engine import scenario as engine
from kvrelay.bench.engine.peers import PeerMissing, PeerProcess, open_peer
from kvrelay.bench.engine.scenario import Round, Timed, summarise
from kvrelay.bench.engine.work import Limits, attention_flops, decode_work, head_weights, layer_weights, prefill_work
from kvrelay.bench.harness.report import percentile
from kvrelay.checkpoint.rope import RopeSpec
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.errors import BenchError, ConfigError

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
    assert results["prefill_4096_gemm_share"] == pytest.approx(0.6)
    assert results["faster_than_transformers_prefill_2048"] == pytest.approx(3.0)
    assert results["faster_than_llama_cpp_b1"] == pytest.approx(4.0), "beside ours with quantised weights"
    assert set(engine.TARGETS) <= set(results)
    assert (results["num_layers"], results["kv_bytes_per_token"]) == (30, 46_080), "which `kvrelay simulate --costs` reads"


def test_without_a_peer_nothing_is_said_about_it() -> None:
    this = _round(1.0, 0.02)
    this.peers.clear()
    assert not any("transformers" in name for name in summarise(SMOLLM2, [this]))


def _round(slowness: float, decode_s: float) -> Round:
    prefill_s = {512: prefill_work(SMOLLM2, 512, 4).flops / LIMITS.flops_per_s / 0.8 * slowness}
    for tokens in (2048, 4096):
        flops = prefill_work(SMOLLM2, tokens, 4).flops + attention_flops(SMOLLM2, tokens)
        prefill_s[tokens] = flops / LIMITS.flops_per_s / 0.6 * slowness

    def timed(factor: float) -> Timed:
        return Timed(
            decode_s=dict.fromkeys(engine.BATCHES, factor * decode_s * slowness),
            best_decode_s=dict.fromkeys(engine.BATCHES, 0.9 * factor * decode_s * slowness),
            prefill_s={tokens: 1.5 * factor * seconds if factor > 1 else seconds for tokens, seconds in prefill_s.items()},
        )

    return Round(
        Limits(bytes_per_s=LIMITS.bytes_per_s / slowness, flops_per_s=LIMITS.flops_per_s / slowness),
        own=timed(1.0),
        quantised=Timed(decode_s=dict.fromkeys(engine.BATCHES, 0.5 * decode_s * slowness), prefill_s=prefill_s),
        peers={"transformers": timed(2.0), "llama.cpp": timed(2.0)},
    )


@pytest.mark.parametrize(("share", "expected"), [(50, 5.0), (99, 10.0), (100, 10.0), (1, 1.0), (90, 9.0)])
def test_percentiles(share: int, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], share) == expected


def test_no_two_prompts_begin_alike() -> None:
    prompts = engine.prompts(64)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {engine.CONTEXT + 1}


def test_peers_are_named_one_by_one() -> None:
    assert engine.chosen_peers("none") == []
    assert engine.chosen_peers("transformers, llama.cpp") == ["transformers", "llama.cpp"]
    with pytest.raises(ConfigError, match=r"unknown peer 'llama.cp'.*llama.cpp"):
        engine.chosen_peers("llama.cp")


def test_a_peer_that_is_not_installed_says_how_to_get_it(tmp_path: pathlib.Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    for name, file in (("vllm", None), ("llama.cpp", tmp_path / "model.gguf")):
        with pytest.raises(PeerMissing, match=r"not installed: .*--peer-python"):
            open_peer(name, "folder", file, [[1]], 1, str(bare))
    with pytest.raises(PeerMissing, match="no GGUF"):
        open_peer("llama.cpp", "folder", None, [[1]], 1, "")


FAKE = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order.get("steps") == 9: sys.exit("it is broken")
    times = [float(len(order["prefill"]))] if "prefill" in order else [len(order["decode"])] * order["steps"]
    print(json.dumps(times), flush=True)
"""


def test_a_peer_in_a_process_of_its_own_is_asked_for_times() -> None:
    peer = PeerProcess([sys.executable, "-c", FAKE], [[1, 2], [3, 4], [5, 6]])
    try:
        assert peer.decode(2, 4) == [2, 2, 2, 2]
        assert peer.prefill([7, 8, 9]) == 3.0
        with pytest.raises(BenchError, match="it is broken"):
            peer.decode(3, 9)
    finally:
        peer.close()
