"""The figures of a simulation. The same seed gives the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvrelay.simulate.clients import Answer
from kvrelay.simulate.run import Outcome, Targets
from kvrelay.states import Role

_SHARES = (50, 90, 99)


def figures(outcome: Outcome, targets: Targets) -> dict[str, float]:
    answers = outcome.answers
    outcomes = Counter(answer.outcome for answer in answers)
    num_good = sum(targets.met(answer) for answer in answers)
    num_prompt_tokens = outcome.num_cached_tokens + outcome.num_prompt_tokens
    found: dict[str, float] = {"requests": len(answers)}
    found |= {name: outcomes[name] for name in ("finished", "failed", "refused")}
    found["seconds"] = outcome.seconds
    found |= times(answers, outcome.gaps_us)
    found["output_tokens_per_s"] = sum(answer.num_tokens for answer in answers) / max(outcome.seconds, 1e-9)
    found["good_share"] = num_good / max(1, len(answers))
    found["goodput_rps"] = num_good / max(outcome.seconds, 1e-9)
    found["cache_hit_share"] = outcome.num_cached_tokens / max(1, num_prompt_tokens)
    found |= {f"idle_share_{role.value}": 1.0 - outcome.busy[role] for role in Role if role in outcome.busy}
    found |= {"preemptions": outcome.num_preemptions, "steps": outcome.num_steps}
    found["images"] = sum(len(answer.session.turns[answer.turn].images) for answer in answers)
    found["images_encoded"] = outcome.num_encoded
    found["role_changes"] = outcome.num_role_changes
    told = {
        "router_messages_per_s": outcome.num_messages,
        "told_blocks_per_s": outcome.num_told_blocks,
        "registry_messages_per_s": outcome.num_registry_messages,
    }
    found |= {name: count / max(outcome.seconds, 1e-9) for name, count in told.items()}
    found["index_mib"] = outcome.index_bytes / (1 << 20)
    return found


def router_times(outcome: Outcome) -> dict[str, float]:
    """Processor time of this machine. It is never the same twice."""
    return {
        **{f"router_us_p{share}": percentile_of(outcome.submit_us, share) for share in (50, 99)},
        "router_us_per_told_block": 1e6 * outcome.listening_s / max(1, outcome.num_told_blocks),
    }


def times(answers: Sequence[Answer], gaps_us: Counter[int]) -> dict[str, float]:
    """Of answers and of gaps between tokens, which may be those of several simulations."""
    finished = [answer for answer in answers if answer.outcome == "finished"]
    return {
        **_percentiles("ttft_ms", [1000 * answer.ttft_s for answer in finished]),
        **{f"itl_ms_p{share}": percentile_of(gaps_us, share) / 1000 for share in _SHARES},
        **_percentiles("longest_gap_ms", [1000 * answer.longest_s for answer in finished]),
    }


def percentile_of(counts: Counter[int], share: int) -> float:
    """The smallest value that at least `share` % of all do not exceed; 0 if there is none."""
    left = -(-counts.total() * share // 100)
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return float(value)
    return 0.0


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {share: max(0, -(-len(ordered) * share // 100) - 1) for share in _SHARES}
    return {f"{name}_p{share}": ordered[place] if ordered else 0.0 for share, place in places.items()}
