"""What a pass and a transfer take: fitted from what `kvrelay bench` measured and published, or given by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from kvrelay.bench.gpu.speed import LLAMA_8B
from kvrelay.cli import main
from kvrelay.errors import ConfigError
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.costs import Costs, attended, interpolate, line
from kvrelay.simulate.fit import H200_8B, fit
from kvrelay.simulate.options import CostOptions
from kvrelay.simulate.run import simulate
from kvrelay.simulate.traffic import Session, Turn

RESULTS = Path(__file__).resolve().parent.parent.parent / "bench" / "results"
MODEL = {"kv_bytes_per_token": 46_080, "num_layers": 30}
CARD = [RESULTS / "nvidia-h200" / name for name in ("gpu.json", "gpu_relay.json")]
XEON = RESULTS / "intel-xeon-processor-2.50ghz-2-cores"
COSTS = Costs(prefill=line(2.0, 0.02), decode=line(4.0, 0.1), latency_ms=0.5, router_ms=0.0, kv_bytes_per_token=1000)


def measured(*paths: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for path in paths:
        found |= json.loads(path.read_text())["results"]
    return found


def of_prompt(costs: Costs, num_tokens: int) -> float:
    return 1000 * costs.pass_s(num_tokens, 0, num_pairs=attended(0, num_tokens))


def test_passes_like_those_that_were_measured_take_what_they_took() -> None:
    costs, found = fit(CARD).costs, measured(*CARD)
    for count in (512, 2048, 8192):
        assert of_prompt(costs, count) == pytest.approx(found[f"prefill_{count}_ms"])
    for count, prompt in ((1, 128), (8, 1024), (64, 1024), (256, 512)):
        step_ms = 1000 * costs.pass_s(0, count, num_held=count * (prompt + 64))
        assert step_ms == pytest.approx(found[f"b{count}_in{prompt}_itl_ms"])
    engine = fit([XEON / "engine.json"], kv_bytes_per_token=46_080, num_layers=30).costs
    found = measured(XEON / "engine.json")
    for count in (512, 2048, 4096):
        assert of_prompt(engine, count) == pytest.approx(found[f"prefill_{count}_ms"])
    for count in (1, 4, 16, 64):
        assert 1000 * engine.pass_s(0, count, num_held=136 * count) == pytest.approx(found[f"decode_ms_b{count}"])


def test_prompts_together_take_what_those_alone_do_not() -> None:
    """16 of 2048 tokens, four a pass: of a figure that is not fitted, 11 % off. One of as many tokens would take longer."""
    costs, found = fit(CARD).costs, measured(*CARD)
    passes_s = 4 * costs.pass_s(8192, 0, num_pairs=4 * attended(0, 2048))
    assert 16 * 2048 / passes_s == pytest.approx(found["prefill_16x2048_tok_s"], rel=0.15)
    assert 1000 * passes_s / 4 < of_prompt(costs, 8192)


def test_what_stands_before_a_chunk_costs_and_so_does_what_a_sequence_holds() -> None:
    whole = attended(0, 8192)
    assert attended(0, 2048) + attended(2048, 6144) == whole
    later, first = (H200_8B.pass_s(512, 0, num_pairs=attended(before, 512)) for before in (32_000, 0))
    assert later > 2 * first
    many, few = (H200_8B.pass_s(0, 64, num_held=64 * held) for held in (8192, 128))
    assert many > 3 * few


def test_the_second_half_of_a_prompt_takes_longer_than_its_first() -> None:
    """In one pass or in chunks it takes the same, if a pass costs nothing by itself."""
    costs = msgspec.structs.replace(COSTS, prefill=line(0.0, 0.02), attention_ms_per_million_pairs=100.0)
    prompt = Session(at_s=0.0, number=0, turns=(Turn(prompt_tokens=4000, output_tokens=2),))
    layout = Layout(local_prefill_tokens=0)
    budget = msgspec.structs.replace(layout.engine, token_budget=1000)
    whole, chunks = (
        simulate(msgspec.structs.replace(layout, engine=engine), costs, [prompt]).answers[0].ttft_s
        for engine in (layout.engine, budget)
    )
    assert whole == pytest.approx(0.08 + 0.1 * 8.0)
    assert chunks == pytest.approx(whole)


def test_steps_take_longer_the_more_their_sequence_holds() -> None:
    costs = msgspec.structs.replace(COSTS, kv_read_ms_per_1000_tokens=1.0)
    session = Session(at_s=0.0, number=0, turns=(Turn(prompt_tokens=3000, output_tokens=2001),))
    (answer,) = simulate(Layout(local_prefill_tokens=0), costs, [session]).answers
    held = sum(range(3002, 3001 + 2000))  # the first step is behind the hand-over
    steps_s = answer.last_at - answer.first_at - answer.longest_s
    assert steps_s == pytest.approx((1999 * 4.1 + held / 1000) / 1000, rel=1e-3)


def test_a_hand_over_takes_what_was_measured_beyond_a_step() -> None:
    """Of a prompt as long as that of `bench relay`, on which nothing is taken from the figure."""
    beyond_ms = measured(XEON / "relay.json")["handover_beyond_step_ms_p50"]
    costs = fit([XEON / "engine.json", XEON / "relay.json"], kv_bytes_per_token=46_080, num_layers=30).costs
    assert costs.latency_ms == beyond_ms
    session = Session(at_s=0.0, number=0, turns=(Turn(prompt_tokens=192, output_tokens=3),))
    (answer,) = simulate(Layout(local_prefill_tokens=0), costs, [session]).answers
    step_s = answer.last_at - answer.first_at - answer.longest_s
    assert 1000 * (answer.longest_s - step_s) == pytest.approx(beyond_ms, abs=0.1)


def test_transfers_of_a_card_are_those_of_its_relay() -> None:
    costs, found = fit([RESULTS / "nvidia-h200" / "gpu_relay.json"]).costs, measured(CARD[1])
    assert costs.gb_per_s == found["ipc_gb_s_2048"]
    assert costs.latency_ms == found["handover_ms_p50"]
    assert (costs.prefill, costs.decode) == (H200_8B.prefill, H200_8B.decode)
    assert fit([XEON / "relay.json"]).costs.gb_per_s == measured(XEON / "relay.json")["shm_gb_per_s"]


def test_without_files_costs_are_those_published_of_a_card() -> None:
    published, known = (msgspec.to_builtins(costs) for costs in (fit(CARD).costs, H200_8B))
    for name, value in published.items():
        if name in ("prefill", "decode"):
            assert known[name] == tuple((count, pytest.approx(ms, abs=0.001)) for count, ms in value)
        else:
            assert known[name] == (pytest.approx(value, rel=0.001) if isinstance(value, float) else value)


def without_model(folder: Path) -> Path:
    """A result file like those that were written before `bench engine` said what it had measured."""
    path = folder / "without_model.json"
    path.write_text(
        json.dumps({"results": {n: value for n, value in measured(XEON / "engine.json").items() if n not in MODEL}})
    )
    return path


def test_the_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    """Files that do not say it are taken for Llama-3.1-8B, and that is said."""
    path, silent = tmp_path / "engine.json", without_model(tmp_path)
    path.write_text(json.dumps({"results": measured(XEON / "engine.json") | MODEL}))
    assumed = fit([silent])
    assert (assumed.costs.kv_bytes_per_token, assumed.costs.num_layers) == (131_072, 32)
    assert assumed.assumed == ("KV bytes per token and layers are those of Llama-3.1-8B",)
    found = fit([path])
    assert (found.costs.kv_bytes_per_token, found.costs.num_layers, found.assumed) == (46_080, 30, ())
    assert fit([path], kv_bytes_per_token=9000).costs.kv_bytes_per_token == 9000
    assert fit([silent], 46_080).assumed == ("layers are those of Llama-3.1-8B",)
    assert fit(CARD).assumed == fit([]).assumed == ()
    shape = {name: int(str(LLAMA_8B[name])) for name in ("num_hidden_layers", "num_key_value_heads")}
    assert H200_8B.num_layers == shape["num_hidden_layers"]
    assert H200_8B.kv_bytes_per_token == 2 * 2 * 128 * shape["num_hidden_layers"] * shape["num_key_value_heads"]
    card = {name: value for name, value in measured(CARD[0]).items() if name != "memory_gb_per_s"}
    silent.write_text(json.dumps({"scenario": "gpu", "results": card}))
    assert fit([silent]).assumed == ("KV is read as on an H200",)


def test_what_files_do_not_say_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--rate", "2", "--seconds", "1", "--output-tokens", "2"]
    assert main.main([*arguments, "--costs", str(without_model(tmp_path))]) == 0
    assert "layers are those of Llama-3.1-8B" in capsys.readouterr().err
    assert main.main([*arguments, *(word for path in CARD for word in ("--costs", str(path)))]) == 0
    assert "Llama" not in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    path.write_text(json.dumps({"scenario": "kv", "results": {"hits": 3.0}}))
    with pytest.raises(ConfigError, match="none of these files"):
        fit([path])


def test_a_pass_of_both_reads_the_weights_once() -> None:
    assert H200_8B.pass_s(512, 8) < H200_8B.pass_s(512, 0) + H200_8B.pass_s(0, 8)
    assert H200_8B.pass_s(512, 8) > H200_8B.pass_s(512, 0)
    assert math.isclose(H200_8B.pass_s(1, 0), H200_8B.pass_s(0, 1))
    assert interpolate(((1, 2.0), (3, 4.0)), 2) == 3.0
    assert interpolate(((1, 2.0), (3, 4.0)), 5) == 6.0


def test_costs_by_hand() -> None:
    costs = CostOptions(prefill_ms=0.1, step_ms=5.0, sequence_ms=0.5, gb_per_s=3.0).fit().costs
    assert costs.pass_s(100, 0, num_pairs=attended(0, 100)) == pytest.approx(0.015)
    assert costs.pass_s(0, 10, num_held=1000) == pytest.approx(0.010)
    assert costs.gb_per_s == 3.0
    longer = CostOptions(prefill_ms=0.1, step_ms=5.0, kv_read_ms=2.0, attention_ms=100.0).fit().costs
    assert longer.pass_s(100, 0, num_pairs=attended(0, 100)) == pytest.approx(0.0155)
    assert longer.pass_s(0, 10, num_held=1000) == pytest.approx(0.007)
