"""A producer in a process of its own, for tests that stop and kill it. Speaks JSON lines: its worker on standard output, then
one transfer on standard input, of which it computes the first half of the prompt and no more."""

from __future__ import annotations

import json
import sys
import time

import msgspec
from relay_pair import Producer

from kvrelay.engine.fence import PASSED
from kvrelay.ids import new_request_id
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.wire.serving import TransferInfo


def main(transport: str, lease_s: str) -> None:
    producer = Producer(transport=transport, settings=TransferSettings(lease_s=float(lease_s), hello_retry_s=0.1))
    print(json.dumps({"worker": producer.id, "address": producer.relay.signal_address}), flush=True)
    transfer = msgspec.json.decode(sys.stdin.readline(), type=TransferInfo)
    request = new_request_id()
    producer.relay.expect(request, transfer, 16)
    producer.relay.start(request, [0, 1, 2, 3], 8, PASSED)
    while True:
        time.sleep(1)
        producer.relay.poll()


if __name__ == "__main__":
    main(*sys.argv[1:])
