"""Drawing tokens: the filters against a naive reference, the distribution, and independence of the batch, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.runner.sampling.draw import Draws, Filters, _chunk_cdf, _weights, draw, greedy
from kvrelay.sampling import uniform


def filters(*rows: tuple[float, int, float, float]) -> Filters:
    """Rows are (temperature, top_k, top_p, min_p)."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return Filters(
        temperature=np.array(temperature, dtype=np.float32),
        top_k=np.array(top_k, dtype=np.int64),
        top_p=np.array(top_p, dtype=np.float64),
        min_p=np.array(min_p, dtype=np.float32),
    )


def draw_one(logits: torch.Tensor, row: tuple[float, int, float, float], uniforms: list[float]) -> list[int]:
    draws = Draws(rows=np.zeros(len(uniforms), dtype=np.int64), uniforms=np.array(uniforms))
    tokens: list[int] = draw(logits[None], filters(row), draws).tolist()
    return tokens


def naive_probabilities(logits: list[float], row: tuple[float, int, float, float]) -> list[float]:
    """In plain Python, from the definitions: temperature, min_p, top_k, top_p; ties to the lower id."""
    temperature, top_k, top_p, min_p = row
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [token for token in order if weights[token] >= min_p]
    kept = kept[:top_k] if top_k else kept
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if top_p < 1.0 and nucleus and mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(logits))]


def is_on_an_edge(logits: list[float], row: tuple[float, int, float, float]) -> bool:
    """Whether rounding decides what is kept: a mass within rounding of top_p, or a weight of min_p."""
    nudged = [
        (row[0], row[1], min(1.0, row[2] * factor) if row[2] < 1.0 else 1.0, row[3] * factor) for factor in (1 - 1e-4, 1 + 1e-4)
    ]
    sets = [{t for t, p in enumerate(naive_probabilities(logits, r)) if p > 0} for r in nudged]
    return sets[0] != sets[1]


ROWS = st.tuples(
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 130, 1000]),
    st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 5, 64, 129, 700]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    levels=st.sampled_from([0, 3]),
    row=ROWS,
)
def test_filters_keep_what_the_definitions_keep(
    seed: int, vocab_size: int, spread: float, levels: int, row: tuple[float, int, float, float]
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=spread, size=vocab_size).astype(np.float32))
    if levels:  # many equal logits
        logits = (logits * levels).round() / levels
    values = logits.tolist()
    if is_on_an_edge(values, row):
        return
    expected = naive_probabilities(values, row)
    cdf = np.cumsum(expected)
    uniforms = [float(u) for u in np.random.default_rng(seed).random(64)]
    for token, u in zip(draw_one(logits, row, uniforms), uniforms, strict=True):
        assert expected[token] > 0.0
        before = cdf[token] - expected[token]
        assert before - 1e-5 <= u <= cdf[token] + 1e-5, "not the inverse CDF in the order of ids"


@pytest.mark.parametrize(
    "row", [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.95, 0.0), (1.3, 50, 1.0, 0.0), (1.0, 0, 1.0, 0.1), (1, 200, 0.9, 0.01)]
)
def test_the_smallest_and_largest_numbers_give_possible_tokens(row: tuple[float, int, float, float]) -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 77, 998]] = torch.tensor([1.0, 2.0, 0.5])
    assert draw_one(logits, row, [0.0, 1.0 - 2.0**-53]) == [3, 998]


def test_one_possible_token_is_always_drawn() -> None:
    logits = torch.full((300,), -torch.inf)
    logits[299] = -5.0
    for row in ((1.0, 0, 1.0, 0.0), (1.0, 7, 0.5, 0.3), (2.0, 0, 0.01, 0.0)):
        assert draw_one(logits, row, [0.0, 0.5, 0.999]) == [299] * 3


def test_broad_distributions_need_more_candidates_and_get_them() -> None:
    logits = torch.linspace(0.0, 1e-3, 5000)
    counts = set(draw_one(logits, (1.0, 0, 0.5, 0.0), [i / 4000 for i in range(4000)]))
    assert min(counts) in range(2495, 2505)
    assert max(counts) == 4999


def test_logits_all_equal_keep_the_lowest_ids() -> None:
    assert set(draw_one(torch.zeros(4000), (1.0, 3, 1.0, 0.0), [i / 100 for i in range(100)])) == {0, 1, 2}


def test_top_p_stops_as_soon_as_the_mass_is_reached() -> None:
    """Four equal tokens and half of the mass: exactly two, in exact arithmetic."""
    uniforms = [i / 16 for i in range(16)]
    assert draw_one(torch.zeros(4), (1.0, 0, 0.5, 0.0), uniforms) == [0] * 8 + [1] * 8


def test_the_distribution_is_softmax() -> None:
    """Chi-square over 20000 draws with fixed numbers: the bound is far out in the tail, and nothing is random."""
    torch.manual_seed(0)
    logits = torch.randn(40) * 1.5
    number = 20000
    tokens = draw_one(logits, (0.8, 0, 1.0, 0.0), [uniform(11, 0, position) for position in range(number)])
    expected = (logits / 0.8).softmax(dim=-1).numpy() * number
    observed = np.bincount(tokens, minlength=40)
    frequent = expected >= 5
    statistic = float(((observed - expected) ** 2 / expected)[frequent].sum())
    freedom = int(frequent.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    assert observed[~frequent].sum() < expected[~frequent].sum() * 3 + 5


def test_samples_and_positions_are_independent_draws() -> None:
    pairs = [(uniform(1, sample, p) < 0.5, uniform(1, sample, p + 1) < 0.5) for sample in range(40) for p in range(50)]
    for first in (False, True):
        for second in (False, True):
            assert abs(pairs.count((first, second)) - 500) < 90


@pytest.mark.parametrize("vocab_size", [50, 1000, 4099])
def test_a_row_is_drawn_alike_in_every_batch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 33
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    kinds = [(1.0, 0, 1.0, 0.0), (0.6, 40, 0.9, 0.0), (1.1, 0, 0.95, 0.0), (0.9, 0, 1.0, 0.05), (1.9, 700, 0.99, 0.0)]
    settings_of = [kinds[index % len(kinds)] for index in range(rows)]
    uniforms = np.array([[uniform(index, 0, p) for p in range(20)] for index in range(rows)])

    def run(chosen: list[int]) -> list[list[int]]:
        draws = Draws(rows=np.repeat(np.arange(len(chosen)), 20), uniforms=uniforms[chosen].reshape(-1))
        tokens = draw(logits[chosen].clone(), filters(*(settings_of[index] for index in chosen)), draws)
        result: list[list[int]] = tokens.view(len(chosen), 20).tolist()
        return result

    everything = run(list(range(rows)))
    for chosen in ([0], [7], [1, 2, 3], [32, 5, 11, 4, 4], list(range(10, 29))):
        assert run(chosen) == [everything[index] for index in chosen]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_weights_are_the_same_bits_in_every_batch(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for vocab_size in (999, 49152):
            logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(1)) * 4
            settings_of = [(0.5 + index / 10, 0, 1.0, 0.01 * (index % 2)) for index in range(9)]
            together = _weights(logits, filters(*settings_of))
            for first, last in ((0, 1), (4, 5), (2, 7)):
                alone = _weights(logits[first:last].clone(), filters(*settings_of[first:last]))
                assert torch.equal(alone, together[first:last])
                assert torch.equal(_chunk_cdf(alone), _chunk_cdf(together)[first:last])
    finally:
        torch.set_num_threads(before)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, -1.0], [-torch.inf, -torch.inf, -4.0]])
    assert greedy(logits) == [1, 0, 2]
