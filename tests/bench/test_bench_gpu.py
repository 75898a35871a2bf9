"""`kvrelay bench gpu`, as far as it goes without a card."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tiny_models import tiny_model

from kvrelay.bench import main
from kvrelay.bench.gpu.requests import generate, greedily
from kvrelay.bench.gpu.scenario import ANCHORS, SCENARIO
from kvrelay.bench.gpu.speed import DECODES, PREFILLS, WIDE_PREFILL
from kvrelay.bench.harness.engine import build_engine
from kvrelay.config import EngineOptions, ModelOptions


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
