"""Parity with transformers, which defines correct: the same greedy tokens, but for counted ties.

A tie is a position where the reference's two best logits differ by less than 1e-4: there either token is right, and the
comparison of that sequence ends.
"""

from __future__ import annotations

from typing import Any

import torch

TIE = 1e-4


@torch.inference_mode()
def reference_tokens(
    model: Any, prompt: list[int], count: int, eos: frozenset[int] = frozenset()
) -> tuple[list[int], list[bool]]:
    """Greedy tokens of transformers, one at a time from its own cache, and which of them were ties."""
    tokens, ties = [], []
    inputs, past = torch.tensor([prompt]), None
    for _ in range(count):
        result = model(inputs, past_key_values=past, use_cache=True)
        past = result.past_key_values
        best = result.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        ties.append(bool(best.values[0] - best.values[1] < TIE))
        if tokens[-1] in eos:
            break
        inputs = torch.tensor([tokens[-1:]])
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
