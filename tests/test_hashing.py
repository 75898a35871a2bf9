"""Block hashes: equal in every process, by whichever way they are computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvrelay.native import hashing
from kvrelay.native.hashing import block_hash, extend_hashes, hash_prompt, root_hash

WAYS = {"native": hashing._hash_blocks(), "hashlib": hashing._hash_by_hashlib}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(hashing, "_hash_blocks", lambda: WAYS[request.param])
    return str(request.param)


def test_there_is_a_native_way_here() -> None:
    assert WAYS["native"] is not WAYS["hashlib"], "no compiler: the tests of this file compare nothing"


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 27, 28, 29, 59, 60, 61, 64, 100, 1024])
def test_a_chain_is_one_block_hash_after_the_other(way: str, block_size: int) -> None:
    rng = random.Random(block_size)
    tokens = [
        rng.choice([rng.randrange(50_000), rng.randrange(-(2**31), 2**31)]) for _ in range(block_size * 7 + block_size // 2)
    ]
    expected, parent = [], root_hash("model", f"salt {block_size}")
    for index in range(7):
        parent = block_hash(parent, tokens[index * block_size : (index + 1) * block_size])
        expected.append(parent)
    root = root_hash("model", f"salt {block_size}")
    hashes: list[bytes] = []
    for num_blocks in (0, 3, 3, 7):  # also in parts
        extend_hashes(hashes, root, tokens, block_size, num_blocks)
    assert hashes == expected
    assert hash_prompt(root, tokens, block_size, 7) == b"".join(expected)
    assert hash_prompt(expected[4], tuple(tokens), block_size, 7, 5) == b"".join(expected[5:])


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**70])
def test_a_token_that_does_not_fit_is_an_error(way: str, token: int) -> None:
    with pytest.raises(OverflowError):
        hash_prompt(root_hash("m", ""), [1, token], 2, 1)
    assert hash_prompt(root_hash("m", ""), [1, 2], 2, 1)  # and leaves nothing behind


def test_a_chain_depends_on_everything_before_and_on_the_seed(way: str) -> None:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash("m", ""), [1, 2, 3, 4], 2, 2)
    assert hashes[1] == block_hash(block_hash(root_hash("m", ""), [1, 2]), [3, 4])
    for root, tokens in (
        (root_hash("m", "x"), [1, 2, 3, 4]),
        (root_hash("n", ""), [1, 2, 3, 4]),
        (root_hash("m", ""), [2, 1, 3, 4]),
    ):
        other: list[bytes] = []
        extend_hashes(other, root, tokens, 2, 2)
        assert other[1] != hashes[1]
    assert root_hash("ab", "c") != root_hash("a", "bc")


def test_hashes_are_equal_in_every_process(way: str) -> None:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash("model", "salt"), [1, 2, 3], 3, 1)
    assert hashes[0].hex() == "4d6796e8b12ee68b025ed487895d03b3"


@pytest.mark.parametrize("below", [hashing.tokens_below, hashing._below_by_comparing], ids=["native", "compared"])
def test_tokens_are_held_against_the_vocabulary(below: Callable[[Sequence[int], int], bool]) -> None:
    assert below([], 5)
    assert below([0, 4, 3], 5)
    assert below((0, 4, 3), 5)
    assert below([2**31], 2**32)
    for outside in (5, 2**30, 2**31, 2**64, -1, -(2**64)):
        assert not below([0, outside, 3], 5), outside
