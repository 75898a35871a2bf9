"""What is left for KV of a card's memory, and what is said when it is not enough."""

from __future__ import annotations

import pytest
import torch

from kvrelay.errors import ConfigError
from kvrelay.runner import gpu_memory
from kvrelay.runner.graphs import graph_sizes

GIB = 2**30
CARD = torch.device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """One of 80 GiB. Weights of 16 GiB are loaded, and the largest step takes 2 more."""
    state = {"free": 63 * GIB, "total": 80 * GIB, "peak": 18 * GIB, "kept": 16 * GIB}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state["peak"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: state["kept"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (state["free"], state["total"]))
    return state


def left(share: float, other_bytes: int = GIB) -> int:
    return gpu_memory.kv_bytes(share, other_bytes, lambda: None, CARD)


def test_kv_gets_what_the_share_leaves_beside_weights_step_and_graphs(card: dict[str, int]) -> None:
    assert left(0.9) == int(80 * GIB * 0.9) - 18 * GIB - GIB - GIB // 2
    assert left(0.5) == 40 * GIB - 18 * GIB - GIB - GIB // 2


def test_a_second_worker_gets_its_share_and_not_what_the_first_has(card: dict[str, int]) -> None:
    card["free"] = 80 * GIB - 36 * GIB - 17 * GIB  # the first worker took its 0.45
    assert left(0.45) == 36 * GIB - 18 * GIB - GIB - GIB // 2
    assert left(0.9) == card["free"] - 2 * GIB - GIB - GIB // 4  # there is no more


def test_too_little_is_said_with_numbers_and_options(card: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as error:
        left(0.2)
    for part in ("19.5 GiB", "16.0 GiB", "80.0 GiB", "63.0 GiB", "--gpu-memory 0.2", "--token-budget", "--max-batch"):
        assert part in str(error.value)


def test_running_out_of_memory_says_what_for(card: dict[str, int]) -> None:
    said = r"loading weights, which takes 16.0 GiB: the card has 80.0 GiB, of which 63.0 GiB"
    with pytest.raises(ConfigError, match=said), gpu_memory.explained("loading weights", 16 * GIB, CARD):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_graphs_are_of_rising_sizes_up_to_a_full_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = graph_sizes(256)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert (sizes[-1], len(sizes)) == (256, 35)
