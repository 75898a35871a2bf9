"""When a sequence ends, as far as its worker can tell. Stop strings are found by the router, which sees the text."""

from __future__ import annotations

from kvrelay.engine.request import Sequence
from kvrelay.states import FinishReason


def finish_reason(sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
    """Looks at the last token only: called after each one."""
    params, tokens = sequence.params, sequence.tokens
    token, count = tokens[-1], len(tokens) - sequence.num_prompt_tokens
    if count >= params.min_tokens:
        if token in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if params.stop_token_ids and token in params.stop_token_ids:
            return FinishReason.STOP
    if count >= params.max_tokens or len(tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None
