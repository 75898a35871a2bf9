"""How far a beam search can go: what admission and the search itself have to agree on."""

from __future__ import annotations

from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Submit


def ends_of(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a hypothesis."""
    eos = frozenset() if params.ignore_eos else eos_token_ids
    return eos.union(params.stop_token_ids)


def most_tokens(submit: Submit, max_model_len: int) -> int:
    """How long an output can become."""
    return min(submit.params.max_tokens, max_model_len - len(submit.prompt))


def most_blocks(submit: Submit, max_model_len: int, block_size: int) -> int:
    """What a search holds if its beams share nothing but the full blocks of the prompt."""
    assert submit.params.beam is not None
    each = -(-(len(submit.prompt) + most_tokens(submit, max_model_len)) // block_size)
    shared = len(submit.prompt) // block_size
    return shared + submit.params.beam.width * (each - shared)
