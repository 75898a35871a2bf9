"""A benchmark in parts, each of which can be run by itself (`--only`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console

from kvrelay.bench.report import Target
from kvrelay.options import suggest

B = TypeVar("B")


@dataclass(frozen=True)
class Part(Generic[B]):
    """`B` is what the command line asked for."""

    title: str
    measure: Callable[[B, Console], dict[str, float]]
    targets: Mapping[str, Target]


def run_parts(parts: Mapping[str, Part[B]], only: Sequence[str], bench: B, console: Console) -> dict[str, float]:
    results: dict[str, float] = {}
    for number, name in enumerate(only, 1):
        console.print(f"{number} of {len(only)}: {parts[name].title}", highlight=False)
        results |= parts[name].measure(bench, console)
    return results


def all_targets(parts: Mapping[str, Part[B]]) -> dict[str, Target]:
    return {name: target for part in parts.values() for name, target in part.targets.items()}


def parse_parts(parts: Mapping[str, Part[B]], text: str) -> tuple[str, ...]:
    """Of `--only`: names with commas between them. They run in the order of `parts`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in parts:
            raise argparse.ArgumentTypeError(f"unknown part {name!r}{suggest(name, parts)} (there are {', '.join(parts)})")
    return tuple(name for name in parts if name in names)
