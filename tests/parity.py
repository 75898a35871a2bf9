"""Parity with transformers, which defines correct: the same greedy tokens, but for counted ties.

A tie is a position where the reference's two best logits differ by less than 1e-4: there either token is right, and the
comparison of that sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

TIE = 1e-4


@torch.inference_mode()
def reference_tokens(
    model: Any, prompt: list[int], count: int, eos: frozenset[int] = frozenset(), guess: Sequence[int] = ()
) -> tuple[list[int], list[bool]]:
    """Greedy tokens of transformers, from its own cache, and which of them were ties. As long as `guess` is right they come
    from one pass, then one at a time."""
    tokens: list[int] = []
    ties: list[bool] = []
    given, guessed, past = prompt, list(guess[: count - 1]), None
    while len(tokens) < count:
        kept = len(guessed) + 1
        result = model(torch.tensor([[*given, *guessed]]), past_key_values=past, use_cache=True, logits_to_keep=kept)
        past = result.past_key_values
        unused = kept
        for logits, next_guess in zip_longest(result.logits[0].float(), guessed):
            unused -= 1
            best = logits.topk(2)
            tokens.append(int(best.indices[0]))
            ties.append(bool(best.values[0] - best.values[1] < TIE))
            if tokens[-1] in eos:
                return tokens, ties
            if tokens[-1] != next_guess:
                break
        if unused:
            past.crop(-unused)
        given, guessed = tokens[-1:], []
    return tokens, ties


def assert_parity(got: list[int], expected: list[int], ties: list[bool], what: str) -> int:
    """Fails on a difference that is no tie. Returns the number of ties met, which is printed too."""
    for position, (token, wanted, tie) in enumerate(zip(got, expected, ties, strict=False)):
        if token != wanted:
            assert tie, f"{what}: token {position} is {token}, transformers says {wanted}: {got} != {expected}"
            print(f"tie in {what} at token {position}")
            return 1
    assert len(got) == len(expected), f"{what}: {len(got)} tokens, transformers gives {len(expected)}"
    return 0
