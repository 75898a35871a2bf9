"""`kvrelay keygen`: makes the key that routers and workers of a cluster share."""

from __future__ import annotations

import pathlib

from kvrelay.options import Parser
from kvrelay.planes import cluster_key


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay keygen", description="Makes the key that routers and workers of a cluster share.")
    default = pathlib.Path(cluster_key.DEFAULT_FILE)
    parser.add_argument(
        "file", nargs="?", type=pathlib.Path, default=default, metavar="FILE", help=f"the key's file (default {default})"
    )
    return parser


def run(argv: list[str]) -> int:
    file = build_parser().parse_strictly(argv).file
    cluster_key.write_new_key(file)
    print(f"wrote {file}: copy it to every host, and start routers and workers with --cluster-key {file}")
    return 0
