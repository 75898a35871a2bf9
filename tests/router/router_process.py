"""`python router_process.py REGISTRY LEASE_S`: a router process that sends one long request, says so, and waits."""

from __future__ import annotations

import sys

import uvloop

from kvrelay.discovery.etcd import EtcdMembership
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.router import Router
from kvrelay.sampling import SamplingParams


async def main(registry: str, registration_s: float) -> None:
    router = Router(
        membership=EtcdMembership(registry, registration_s=registration_s),
        metrics=Metrics(),
        registration_s=registration_s,
        model="stub",
    )
    router.start()
    await router.until_usable(1)
    stream = router.submit(GenerateRequest(external_id="client", prompt=[1], params=SamplingParams(max_tokens=100)))
    print("sent", flush=True)
    while await stream.next():
        pass


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], float(sys.argv[2])))
