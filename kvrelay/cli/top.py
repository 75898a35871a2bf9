"""`kvrelay top`: what a running server does, live in the terminal: its workers, and the last requests stage by stage.

It asks `GET /cluster` and `GET /requests` again and again; the server does nothing for it in between.
"""

from __future__ import annotations

import time
import urllib.parse

import httpx
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cli import client as http
from kvrelay.options import Parser
from kvrelay.wire.timelines import TimelineShown

_BAR = 40  # characters of a whole timeline
_COLORS = {
    "route": "white", "queue": "bright_black", "encode": "magenta", "prefill": "blue", "reserve": "bright_black",
    "transfer": "yellow", "hand_over": "yellow", "decode": "green", "swapped": "red", "restore": "red",
}  # fmt: skip
_EPILOG = """\
examples:
  kvrelay top                        ends with Ctrl-C
  kvrelay top --once --requests 5    prints once, for a script or a report
  kvrelay top chatcmpl-1a2b3c        one request: its stages with their times and workers, failovers, parent and children
"""


class Blocks(msgspec.Struct, frozen=True):
    total: int
    free: int
    cached: int


class Worker(msgspec.Struct, frozen=True):
    """An entry of GET /cluster, as far as it is shown."""

    id: str
    role: str
    state: str
    running: int
    waiting: int
    transferring: int
    swapped: int
    blocks: Blocks
    problem: str = ""


class Cluster(msgspec.Struct, frozen=True):
    model: str = ""
    in_flight: int = 0
    workers: list[Worker] = []


class Requests(msgspec.Struct, frozen=True):
    data: list[TimelineShown]


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay top", description="Shows live what a running server does.", epilog=_EPILOG)
    parser.add_argument("request", nargs="?", default="", metavar="REQUEST", help="the id of one request, or of its answer")
    http.add_url(parser)
    http.add_api_key(parser)
    parser.add_argument("--requests", type=int, default=15, metavar="N", help="requests that are shown (default 15)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="X", help="seconds between two looks (default 1.0)")
    parser.add_argument("--once", action="store_true", help="print once and end")
    return parser


def run(argv: list[str]) -> int:
    arguments = build_parser().parse_strictly(argv)
    console = Console()
    with http.connect(arguments.url, arguments.api_key) as client:
        if arguments.once:
            console.print(look(client, arguments.requests, arguments.request))
            return 0
        first = look(client, arguments.requests, arguments.request)
        with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(max(0.1, arguments.interval))
                live.update(look(client, arguments.requests, arguments.request), refresh=True)


def look(client: httpx.Client, num_requests: int, name: str = "") -> Group:
    """At one request, if it is named."""
    if name:
        found = http.ask(client, "GET", f"/requests/{urllib.parse.quote(name, safe='')}", Requests)
        return Group(request_table(found.data), *map(details, found.data), _legend())
    cluster = http.ask(client, "GET", "/cluster", Cluster)
    requests = http.ask(client, "GET", f"/requests?limit={max(1, num_requests)}", Requests)
    title = Text(f"{cluster.model}: {len(cluster.workers)} workers, {cluster.in_flight} requests in flight")
    return Group(title, worker_table(cluster.workers), request_table(requests.data), _legend())


def worker_table(workers: list[Worker]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "state", "running", "waiting", "transferring", "swapped", "blocks in use"):
        table.add_column(name, justify="left" if name in ("worker", "state") else "right")
    for worker in workers:
        blocks = worker.blocks
        used = blocks.total - blocks.free - blocks.cached
        counts = (worker.running, worker.waiting, worker.transferring, worker.swapped)
        table.add_row(worker.id, worker.problem or worker.state, *map(str, counts), f"{used}/{blocks.total}")
    return table


def request_table(requests: list[TimelineShown]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("request", "state", "tokens", "first token", "total", "timeline"):
        table.add_column(name, justify="left" if name in ("request", "state", "timeline") else "right", no_wrap=True)
    for request in requests:
        first = "" if request.first_token_ms is None else f"{request.first_token_ms:.0f} ms"
        state = request.state + (f", sent again {len(request.failovers)}x" if request.failovers else "")
        tokens = f"{request.prompt_tokens}+{request.output_tokens}"
        table.add_row(request.id[:24], state, tokens, first, f"{request.total_ms:.0f} ms", bar(request))
    return table


def details(request: TimelineShown) -> Group:
    """What happened to it, in the order of time, and its names and relatives."""
    table = Table(box=None, pad_edge=False)
    for name in ("began after", "took", "stage", "attempt", "worker"):
        table.add_column(name, justify="left" if name in ("stage", "worker") else "right")
    stages = [(one.start_ms, f"{one.ms:.1f} ms", one.stage, str(one.attempt), one.worker or "router") for one in request.stages]
    again = [(one.at_ms, "", "sent again", "", one.reason) for one in request.failovers]
    for at_ms, *rest in sorted(stages + again):
        table.add_row(f"{at_ms:.1f} ms", *rest)
    names = [("answer", request.answer_id), ("trace", request.trace_id), ("transfer", request.transfer_id)]
    names += [("continues from", request.parent), ("continued by", ", ".join(request.children))]
    clocks = request.clocks.items()
    names += [("clock of", f"{worker} {clock.offset_ms:+.1f} ms (± {clock.error_ms:.1f})") for worker, clock in clocks]
    return Group(table, *(Text(f"{name} {value}") for name, value in names if value))


def bar(request: TimelineShown) -> Text:
    """Each character is the stage that began last before its moment."""
    text = Text()
    scale_ms = max(request.total_ms, 1e-6) / _BAR
    for place in range(_BAR):
        middle_ms = (place + 0.5) * scale_ms
        under_way = [one for one in request.stages if one.start_ms <= middle_ms < one.start_ms + one.ms]
        stage = max(under_way, key=lambda one: one.start_ms).stage if under_way else ""
        text.append("█" if stage else "·", style=_COLORS.get(stage, "bright_black"))
    return text


def _legend() -> Text:
    text = Text()
    for stage, color in _COLORS.items():
        text.append("█ ", style=color).append(f"{stage}  ")
    return text
