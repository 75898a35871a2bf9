"""Images in virtual time: the real encode engine and router, towers and embeddings that only cost time."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvrelay.cli import main
from kvrelay.config import EngineOptions
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.costs import Costs, line
from kvrelay.simulate.figures import figures
from kvrelay.simulate.find import Prices, cheapest
from kvrelay.simulate.run import Failure, Outcome, Targets, simulate
from kvrelay.simulate.traffic import Kind, Shown, Wanted, draw, read_trace
from kvrelay.states import Role

COSTS = Costs(
    prefill=line(2.0, 0.02), decode=line(4.0, 0.1), encode=line(10.0, 0.1), latency_ms=0.5, embedding_bytes_per_token=20_000
)
LAYOUT = Layout(
    prefill=2,
    decode=2,
    encode=2,
    takes_images=True,
    num_blocks=512,
    max_model_len=4096,
    local_prefill_tokens=16,
    restart_s=1.0,
    engine=EngineOptions(check_invariants=True),
)
TARGETS = Targets(ttft_ms=200.0, itl_ms=20.0)


def wanted(kind: Kind = "fixed", seed: int = 1, num_images: int = 0) -> Wanted:
    return Wanted(
        kind=kind, rate=6.0, duration_s=5.0, input_tokens=100, output_tokens=10, pause_s=0.5,
        image_share=0.5, image_tokens=200, num_images=num_images, seed=seed,
    )  # fmt: skip


def run(layout: Layout, traffic: Wanted, failures: tuple[Failure, ...] = ()) -> Outcome:
    """`simulate` raises if a request did not end once, a block did not come back, or an image is still held."""
    return simulate(layout, COSTS, draw(traffic), failures=failures)


def test_an_image_takes_the_tower_and_its_way() -> None:
    """On an idle cluster: encoded, moved, and computed with the words behind it."""
    traffic = msgspec.structs.replace(wanted(), image_share=1.0)
    (answer,) = simulate(LAYOUT, COSTS, [next(draw(traffic))]).answers
    moved_s = COSTS.embedding_s(200) + 2 * COSTS.latency_ms / 1000
    assert answer.ttft_s == pytest.approx(COSTS.router_ms / 1000 + COSTS.encode_s(200) + moved_s + COSTS.pass_s(300, 0))


@pytest.mark.parametrize("kind", ["fixed", "bursty", "long-prefix", "conversation"])
def test_the_same_seed_gives_the_same_result(kind: Kind) -> None:
    first, again, other = (figures(run(LAYOUT, wanted(kind, seed)), TARGETS) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first["requests"] == first["finished"] > 0
    assert first["images"] == first["images_encoded"] > 0
    assert 0.0 < first["idle_share_encode"] < 1.0


def test_an_image_that_was_seen_is_not_encoded_again() -> None:
    found = figures(run(LAYOUT, wanted(num_images=2)), TARGETS)
    assert found["images"] > 4 >= found["images_encoded"]


def test_text_is_the_same_with_and_without_images() -> None:
    with_images = [(one.at_s, one.turns[0].prompt_tokens) for one in draw(wanted("mixed"))]
    without = msgspec.structs.replace(wanted("mixed"), image_share=0.0)
    assert with_images == [(one.at_s, one.turns[0].prompt_tokens) for one in draw(without)]


@pytest.mark.parametrize("mode", ["write", "read"])
def test_no_request_is_lost_with_an_encode_worker_or_with_those_that_it_encodes_for(mode: str) -> None:
    layout = msgspec.convert(msgspec.to_builtins(LAYOUT) | {"mode": mode}, Layout)
    failures = [(0.71, Role.ENCODE), (1.4, Role.PREFILL), (2.2, Role.ENCODE), (2.9, Role.DECODE), (3.6, Role.ENCODE)]
    traffic = msgspec.structs.replace(wanted("mixed"), rate=25.0)
    outcome = run(layout, traffic, tuple(Failure(at_s=at_s, role=role) for at_s, role in failures))
    assert {answer.outcome for answer in outcome.answers} == {"finished"}
    assert len(outcome.answers) > 50


def test_without_an_encode_worker_that_comes_back_only_text_is_answered() -> None:
    layout = msgspec.structs.replace(LAYOUT, encode=1)
    outcome = run(layout, wanted(), (Failure(at_s=2.0, role=Role.ENCODE, comes_back=False),))
    failed = [answer for answer in outcome.answers if answer.outcome == "failed"]
    assert failed
    assert all(answer.session.turns[0].images for answer in failed)


def test_whole_workers_encode_themselves() -> None:
    layout = msgspec.structs.replace(LAYOUT, prefill=0, decode=0, encode=0, whole=2)
    found = figures(run(layout, wanted()), TARGETS)
    assert found["requests"] == found["finished"]
    assert found["images"] == found["images_encoded"] > 0


def test_find_counts_encode_workers() -> None:
    """Which is known here: 2 encode, 3 prefill and 5 decode workers."""

    def meets(layout: Layout) -> bool:
        return layout.encode >= 2 and layout.prefill >= 3 and layout.decode >= 5

    found = cheapest(meets, LAYOUT, Prices(encode=2.0), most_workers=40)
    assert found is not None
    assert (found.encode, found.prefill, found.decode) == (2, 3, 5)


def test_find_needs_a_worker_of_each_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert cheapest(lambda layout: True, LAYOUT, Prices(), most_workers=2) is None
    found = cheapest(lambda layout: True, LAYOUT, Prices(), most_workers=3)
    assert found is not None
    assert (found.encode, found.prefill, found.decode) == (1, 1, 1)
    traffic = ["--rate", "5", "--seconds", "1", "--image-share", "1", "--image-tokens", "100", "--encode", "1"]
    assert main.main(["simulate", *traffic, "--find", "--most-workers", "2"]) == 2
    assert "with images a cluster has at least 3 workers" in " ".join(capsys.readouterr().err.split())


def test_find_by_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image takes 100 ms and 25 come each second: 3 encode workers, and no fewer, keep up."""
    result = tmp_path / "found.json"
    traffic = ["--rate", "25", "--seconds", "8", "--input-tokens", "64", "--output-tokens", "4", "--ttft-ms", "1000"]
    images = ["--image-share", "1", "--image-tokens", "100", "--encode", "1", "--encode-ms", "1"]
    costs = ["--prefill-ms", "0.01", "--step-ms", "1", "--sequence-ms", "0.01"]
    search = ["--find", "--most-workers", "12", "--good-share", "0.9", "--json", str(result)]
    assert main.main(["simulate", *traffic, *images, *costs, *search]) == 0
    found = json.loads(result.read_text())["results"]
    assert (found["encode"], found["prefill"], found["decode"]) == (3, 1, 1)
    assert "3 encode and 1 prefill and 1 decode" in capsys.readouterr().err


def test_a_trace_has_images(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 0.0, "prompt_tokens": 20, "output_tokens": 5, "images": [{"tokens": 64, "name": "logo"}, {"tokens": 32}]},
        {"at_s": 1.0, "prompt_tokens": 30, "output_tokens": 5, "images": [{"tokens": 64, "name": "logo"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(path)
    assert first.turns[0].images == (Shown(64, "logo"), Shown(32))
    prompt = first.first_prompt()
    assert len(prompt.tokens) == 64 + 32 + 20
    assert [(image.start, image.num_tokens) for image in prompt.images] == [(0, 64), (64, 32)]
    assert prompt.tokens[:64] == second.first_prompt().tokens[:64]
    outcome = simulate(LAYOUT, COSTS, [first, second])
    assert {answer.outcome for answer in outcome.answers} == {"finished"}
    assert figures(outcome, TARGETS)["images_encoded"] == 2
