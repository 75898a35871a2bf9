"""`kvrelay bench gpu`, as far as it goes without a card."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_models import tiny_model

from kvrelay.bench import main
from kvrelay.bench.gpu import copies, relay
from kvrelay.bench.gpu.requests import generate, greedily
from kvrelay.bench.gpu.scenario import ANCHORS, SCENARIO
from kvrelay.bench.gpu.speed import DECODES, LLAMA_8B, PREFILLS, WIDE_PREFILL
from kvrelay.bench.harness.engine import build_engine
from kvrelay.bench.harness.pair import open_pair
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.errors import BenchError


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.run(["gpu"]) == 2
    assert "needs an NVIDIA card" in capsys.readouterr().err


def test_every_anchor_is_a_figure_with_a_target() -> None:
    wide = f"prefill_{WIDE_PREFILL[0]}x{WIDE_PREFILL[1]}_tok_s"
    assert set(ANCHORS) == {work.name for work in DECODES} | {f"prefill_{length}_ms" for length in PREFILLS} | {wide}
    assert set(ANCHORS) <= SCENARIO.targets.keys()


def test_all_prompts_are_generated_from_to_the_same_length() -> None:
    folder = pathlib.Path(tiny_model("llama"))
    engine, _ = build_engine(ModelOptions(model=str(folder), threads=1), EngineOptions(kv_blocks=32))
    outputs = generate(engine, [[5, 6, 7], [8], [9] * 40], greedily(6))
    engine.close()
    assert [len(output) for output in outputs] == [6, 6, 6]


SMALL = {
    **{name: LLAMA_8B[name] for name in ("architectures", "model_type", "rms_norm_eps", "hidden_act", "tie_word_embeddings")},
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 65536, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def test_the_relay_is_measured_over_http_whatever_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PROMPTS", (80, 96))
    monkeypatch.setattr(relay, "LATE_TOKENS", 128)
    monkeypatch.setattr(relay, "LONG_TOKENS", 128)
    monkeypatch.setattr(relay, "STREAMS", 4)
    monkeypatch.setattr(relay, "_ENDLESS", 30_000)  # however fast the machine is
    monkeypatch.setattr(relay, "_SETTLE_S", 0.1)
    settings: dict[str, object] = {"device": "cpu", "threads": 1, "kv-blocks": 16384}
    results = relay.measure_servers(1, 1, settings, Console(quiet=True), 50, SMALL)
    assert results["handover_ms_p50"] > -1000.0
    assert 0.0 <= results["late_bytes_share"] <= 1.0
    names = {
        "ttft_1p1d_80_ms",
        "ttft_whole_96_ms",
        "itl_p99_ms_1p1d",
        "itl_max_ms_1p1d",
        "itl_max_ms_1p1d_all_sms",
        "ttft_1p1d_part_96_ms",
        "itl_p99_ms_whole",
        "prompts_per_min_whole",
    }
    assert names <= results.keys()
    assert all(results[name] > 0.0 for name in names)


def test_two_processes_move_kv_and_what_arrives_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NIXL, which moves host memory just as well."""
    monkeypatch.setattr(copies, "LENGTHS", (64, 128))
    ranges = copies.kv_ranges(copies.pool_layout(), 64)
    with open_pair(copies.CardPeer, "nixl", copies.pool_layout().size_bytes, device="cpu") as pair:
        assert pair.mover.ask(copies.CardPeer.move, ranges) > 0.0
        pair.check(ranges)
        with pytest.raises(BenchError, match="not those that were sent"):
            pair.check(ranges + np.array([8, 0, 0]))


def test_the_figures_that_were_promised_have_targets() -> None:
    promised = {"handover_ms_p50", "late_bytes_share", "itl_p99_ms_1p1d", "itl_max_ms_1p1d", "ipc_over_device_copy_2048"}
    assert promised <= SCENARIO.parts["relay"].targets.keys()
    assert not SCENARIO.parts["relay"].by_default
