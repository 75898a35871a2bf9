"""The options of `kvrelay bench kv`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvrelay.bench.harness.scenario import ModelBench
from kvrelay.config import Positive


class KVBench(ModelBench, frozen=True, kw_only=True):
    """What is measured, and how often."""

    rounds: Annotated[Positive, Meta(description="rounds; figures are medians over them")] = 5
    profile: Annotated[str, Meta(description="file of the scheduler's profile")] = "bench/results/kv-scheduler-profile.txt"
