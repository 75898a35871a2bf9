"""A row of README's tables: which figures of a scenario it shows, and how. Its target, and whether it is missed, come from the
scenario's own targets; what a machine's files lack is "not measured"."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.bench.harness.report import Target
from kvrelay.bench.main import find_scenario


def names_in(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


@dataclass(frozen=True)
class Row:
    """`shown` is a format string over the figures' names; `unit` follows the target's number. `statistic` is one, too, over the
    names of counts, which older files lack. `provided` names a figure without which, or with which as 0, nothing is shown."""

    what: str
    scenario: str
    shown: str
    unit: str = ""
    statistic: str = ""
    provided: str = ""

    def figures(self) -> list[str]:
        return [*names_in(self.shown), *([self.provided] if self.provided else [])]

    def counts(self) -> list[str]:
        return names_in(self.statistic)

    def targets(self) -> dict[str, Target]:
        known = find_scenario(self.scenario).targets
        return {name: known[name] for name in self.figures() if name in known}

    def target(self) -> str:
        bounds = list(self.targets().values())
        bounds = bounds if len(set(bounds)) > 1 else bounds[:1]
        if len({bound.comparison for bound in bounds}) > 1:
            return ", ".join(f"{bound}{self.unit}" for bound in bounds)
        return f"{bounds[0].comparison} {' / '.join(f'{bound.value:g}' for bound in bounds)}{self.unit}" if bounds else ""

    def statistics(self, machines: Sequence[Mapping[str, float]]) -> str:
        """Of all machines, once if they are alike; "n" where none says how many."""
        counted = [results for results in machines if all(name in results for name in self.counts())]
        written = dict.fromkeys(self.statistic.format(**results) for results in counted)
        return "; ".join(written) or re.sub(r"\{.*?\}", "n", self.statistic)

    def cell(self, results: Mapping[str, float]) -> str:
        if not all(name in results for name in self.figures()) or (self.provided and not results[self.provided]):
            return "not measured"
        missed = [name for name, bound in self.targets().items() if not bound.met(results[name])]
        note = "" if not missed else " (missed)" if len(missed) == 1 or len(missed) < len(self.targets()) else " (all missed)"
        return self.shown.format(**results) + note
