"""`kvrelay role WORKER ROLE`: lets one worker of a running server come back in another role. Its steps are `drain.py`'s."""

from __future__ import annotations

import time

import httpx

from kvrelay.cli import client as http
from kvrelay.cli.drain import Line, Worker, find, order, order_parser, say, sleep_until, wait_until_gone, workers_of
from kvrelay.options import Parser
from kvrelay.states import Role

_EPILOG = """\
The worker finishes what it has, leaves, and comes back as a new worker of the same process.

examples:
  kvrelay role prefill-7c decode
  kvrelay role prefill-7c whole --url http://10.0.0.1:8000 --api-key secret
"""


def build_parser() -> Parser:
    description = "Lets a worker finish what it has and come back in another role."
    parser = order_parser("kvrelay role", description, _EPILOG)
    parser.add_argument("role", choices=[role.value for role in Role], metavar="ROLE", help="whole, prefill, decode or encode")
    return parser


def run(argv: list[str]) -> int:
    arguments = build_parser().parse_strictly(argv)
    with http.connect(arguments.url, arguments.api_key) as client:
        worker = find(client, arguments.worker)
        order(client, "/admin/role", {"worker": worker.id, "role": arguments.role})
        if arguments.no_wait:
            return say(f"{worker.id} drains, to come back as a {arguments.role} worker")
        deadline = time.monotonic() + arguments.timeout
        wait_until_gone(client, worker, deadline)
        back = _wait_until_back(client, worker, deadline)
        return say(f"{worker.id} is back as {back.id}")


def _wait_until_back(client: httpx.Client, worker: Worker, deadline: float) -> Worker:
    line = Line()
    while True:
        for now in workers_of(client):
            if now.place == worker.place and now.id != worker.id and now.state == "ready":
                line.end()
                return now
        line.show(f"{worker.id} has left and starts again")
        sleep_until(deadline, f"{worker.id} has left and is not back yet; the log of its process says why")
