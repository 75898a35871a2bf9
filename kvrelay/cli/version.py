"""`kvrelay version`."""

from __future__ import annotations

from kvrelay.options import Parser
from kvrelay.version import version


def build_parser() -> Parser:
    return Parser(prog="kvrelay version", description="Prints the version.")


def run(argv: list[str]) -> int:
    build_parser().parse_strictly(argv)
    print(f"kvrelay {version()}")
    return 0
