"""The store of images' features: what is held stays, the rest gives way, oldest use first, and nothing is counted twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.runner.vision.features import FeatureStore

ROW_BYTES = 4 * 4


def rows(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count, 4), value)


def store_for(num_rows: int) -> FeatureStore:
    return FeatureStore(num_rows * ROW_BYTES, device=torch.device("cpu"), dtype=torch.float32)


def test_what_was_put_is_there_and_counted_once() -> None:
    store = store_for(10)
    assert not store.is_ready("a")
    assert store.put("a", rows(3, 2.0))
    assert store.put("a", rows(3, 9.0))
    assert store.is_ready("a")
    assert torch.equal(store.get("a"), rows(3, 2.0))
    assert store.num_bytes == 3 * ROW_BYTES


def test_the_least_recently_used_gives_way() -> None:
    store = store_for(10)
    for digest in "abc":
        store.put(digest, rows(3))
    store.get("a")
    store.put("d", rows(4))
    assert [store.is_ready(digest) for digest in "abcd"] == [True, False, True, True]


def test_what_is_held_stays_even_beyond_the_bound_and_goes_when_released() -> None:
    store = store_for(5)
    for digest in "ab":
        store.hold(digest)
        assert store.put(digest, rows(4))
    assert not store.put("c", rows(1)), "nobody holds it, and those held take all the room"
    assert store.num_bytes == 8 * ROW_BYTES
    assert not store.has_room(1)
    store.release("a")
    assert [store.is_ready(digest) for digest in "ab"] == [False, True]
    assert store.has_room(ROW_BYTES)
    store.release("b")
    assert store.is_ready("b"), "there is room for it"
    assert store.num_held == 0


def test_holds_are_counted() -> None:
    store = store_for(2)
    store.hold("a")
    store.hold("a")
    store.put("a", rows(4))
    store.release("a")
    assert store.is_ready("a")
    store.release("a")
    assert not store.is_ready("a")
    with pytest.raises(AssertionError, match="not held"):
        store.release("a")


def test_features_that_are_not_here_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="are not here"):
        store_for(1).get("a")


def test_features_take_the_models_precision() -> None:
    store = FeatureStore(1000, device=torch.device("cpu"), dtype=torch.bfloat16)
    store.put("a", rows(2))
    assert store.get("a").dtype is torch.bfloat16
    assert store.num_bytes == 2 * ROW_BYTES // 2


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["hold", "release", "put", "get"]), st.integers(0, 5), st.integers(1, 4)), max_size=40
    )
)
def test_bytes_are_exact_and_nothing_held_is_lost(steps: list[tuple[str, int, int]]) -> None:
    store, holds, sizes = store_for(8), Counter[str](), {str(key): 1 + key % 4 for key in range(6)}
    for action, key, _ in steps:
        digest = str(key)
        ready = store.is_ready(digest)
        match action:
            case "hold":
                store.hold(digest)
                holds[digest] += 1
            case "release" if holds[digest]:
                store.release(digest)
                holds[digest] -= 1
            case "put":
                kept = store.put(digest, rows(sizes[digest], float(key)))
                assert kept == store.is_ready(digest)
                assert kept or not holds[digest]
                ready = kept
            case "get" if ready:
                assert torch.equal(store.get(digest), rows(sizes[digest], float(key)))
        assert store.is_ready(digest) or not (ready and holds[digest])
        there = {name: size for name, size in sizes.items() if store.is_ready(name)}
        assert store.num_bytes == sum(there.values()) * ROW_BYTES
        unheld = [name for name in there if not holds[name]]
        assert store.num_bytes <= 8 * ROW_BYTES or not unheld, "what nobody holds may not exceed the bound"
