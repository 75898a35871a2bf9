"""The benchmark of encode workers: its model and prompts, and one whole run."""

from __future__ import annotations

import json
import pathlib

import pytest

from kvrelay.bench import main
from kvrelay.bench.encode import transfer
from kvrelay.bench.encode.model import open_model
from kvrelay.bench.encode.scenario import SCENARIO
from kvrelay.errors import BenchError
from kvrelay.media.placeholders import is_placeholder


def test_its_model_has_a_larger_tower_and_its_prompts_never_begin_alike() -> None:
    with open_model("") as model:
        assert model.options.load == "dummy"
        (first, images), (second, same) = model.prompt(1, 10), model.prompt(1, 11)
        assert images[0].digest == same[0].digest != model.prompt(2, 10)[1][0].digest
        assert first[0] != second[0] or first[1] != second[1]
        assert sum(map(is_placeholder, first)) == images[0].num_tokens == 144


def test_a_text_model_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    with pytest.raises(BenchError, match="takes no images"), open_model(str(tmp_path)):
        pass


def test_parts_run_in_their_order() -> None:
    assert SCENARIO.chosen_parts("cache,transfer") == ["transfer", "cache"]


@pytest.mark.long
def test_a_whole_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ROUNDS", 1)
    assert main.run(["encode", "--requests", "8", "--json", str(tmp_path / "encode.json")]) == 0
    results = json.loads((tmp_path / "encode.json").read_text())["results"]
    assert results["hit_tower_calls"] == results["hit_bytes"] == 0
    assert (results["shm_resumes"], results["shm_many_resumes"]) == (1.0, 9.0)  # as their ways are named for
    assert all(figure > 0 for name, figure in results.items() if name.startswith("shm_"))
    assert results["text_ttft_p99_ms_split"] > 0
