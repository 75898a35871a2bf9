"""`kvrelay bench router`: what the router costs, and what its choices are worth. In parts, a file each."""

from __future__ import annotations

from kvrelay.bench.harness.scenario import Scenario
from kvrelay.bench.router import decision, failover, feed, http, idle, multiturn, routers

SCENARIO = Scenario(
    http.RouterBench,
    {
        "http": http.PART,
        "routers": routers.PART,
        "decision": decision.PART,
        "idle": idle.PART,
        "feed": feed.PART,
        "multiturn": multiturn.PART,
        "failover": failover.PART,
    },
)
