"""A model split among ranks: what each of them has, how they meet, and that together they are the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from rank_meeting import ranks_in_memory
from tiny_models import tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.errors import ConfigError, RankDiedError
from kvrelay.kernels.ranks import SharedRanks
from kvrelay.progress import Silent
from kvrelay.runner.loader import DummySource, Fp8Source
from kvrelay.runner.ranks.shares import RankShare, RankSource, check_split


@pytest.mark.parametrize(("name", "num_ranks"), [("kv1", 4), ("kv2", 2), ("kv2", 4), ("kv3", 2), ("kv3", 3), ("kv8", 4)])
def test_every_head_and_column_is_summed_once(name: str, num_ranks: int) -> None:
    whole = read_spec(tiny_model(name))
    shares = [RankShare(whole, rank, num_ranks) for rank in range(num_ranks)]
    assert len({share.spec for share in shares}) == 1
    assert [head for share in shares for head in share.heads[share.num_repeated_heads :]] == list(range(whole.num_heads))
    assert [column for share in shares for column in share.inner] == list(range(whole.intermediate_size))
    group = whole.num_heads // whole.num_kv_heads
    for share in shares:
        assert {head // group for head in share.heads} == set(share.kv_heads)


@pytest.mark.parametrize(
    ("name", "num_ranks", "says"),
    [("kv2", 5, "48 columns"), ("kv2", 3, "4 heads that share 2 KV heads"), ("kv2", 48, "32 ranks"), ("kv8", 6, "without any")],
)
def test_a_number_that_cannot_work_is_refused(name: str, num_ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--tp {num_ranks}: .*{says}"):
        check_split(read_spec(tiny_model(name)), num_ranks)


@pytest.fixture
def meeting() -> Iterator[list[SharedRanks]]:
    with ranks_in_memory(3) as ranks:
        yield ranks


def test_sums_of_any_size_are_the_same_for_all(meeting: list[SharedRanks]) -> None:
    sizes = [1, 5, 576, (1 << 18) + 3, 7, 1 << 19]
    results: list[list[torch.Tensor]] = [[] for _ in meeting]

    def work(ranks: SharedRanks) -> None:
        for size in sizes:
            x = torch.full((size,), float(ranks.rank + 1))
            results[ranks.rank].append(ranks.add_up(x))
            ranks.meet()
            results[ranks.rank].append(ranks.spread(torch.full((size,), float(ranks.rank + 7))))

    threads = [threading.Thread(target=work, args=[ranks]) for ranks in meeting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        for index, size in enumerate(sizes):
            assert torch.equal(result[2 * index], torch.full((size,), 6.0))
            assert torch.equal(result[2 * index + 1], torch.full((size,), 7.0))


def test_whoever_waits_for_a_dead_rank_is_told(meeting: list[SharedRanks]) -> None:
    failures: list[RankDiedError] = []

    def wait() -> None:
        try:
            meeting[0].add_up(torch.ones(3))
        except RankDiedError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    meeting[1].end()
    thread.join()
    assert len(failures) == 1


def test_weights_in_fp8_are_cut_with_their_scales() -> None:
    """Put together, the shares of the ranks are the whole, each output with the scale of all its columns."""
    whole = read_spec(tiny_model("kv2"))
    sources = [Fp8Source(DummySource(torch.device("cpu"), torch.float32, Silent())) for _ in range(3)]
    hidden, inner = whole.hidden_size, whole.intermediate_size
    for name, shape, along in (("mlp.gate_proj", (inner, hidden), 0), ("mlp.down_proj", (hidden, inner), 1)):
        expected, scales = sources[2].take_linear(f"model.layers.0.{name}.weight", shape)
        parts = []
        for rank in range(2):
            share = RankShare(whole, rank, 2)
            cut = (share.spec.intermediate_size, hidden) if along == 0 else (hidden, share.spec.intermediate_size)
            parts.append(RankSource(share, sources[rank]).take_linear(f"model.layers.0.{name}.weight", cut))
        weight = torch.cat([part.float() for part, _ in parts], dim=along)
        assert torch.equal(weight, expected.float())
        found = [scale for _, scale in parts if scale is not None]
        assert scales is not None
        assert torch.equal(torch.cat(found) if along == 0 else found[0], scales)
