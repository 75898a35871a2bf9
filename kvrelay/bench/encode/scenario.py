"""`kvrelay bench encode`: what encode workers and the relay of their embeddings cost and give."""

from __future__ import annotations

from kvrelay.bench.encode import traffic, transfer
from kvrelay.bench.encode.model import EncodeBench
from kvrelay.bench.harness.scenario import Scenario

SCENARIO = Scenario(EncodeBench, {"transfer": transfer.PART, "text": traffic.TEXT_PART, "cache": traffic.CACHE_PART})
