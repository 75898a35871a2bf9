"""Draws the diagrams of docs/ for the site as SVG, so that it needs no script and no outside host. They are written in the
subset of Mermaid that these pages use, and which GitHub draws by itself: messages between participants, states, and boxes
with arrows (flowcharts.py).

    svg_of(source)     one diagram

A sequence goes down the page, a column for each participant. States stand below each other in the order of their first
mention; a change to the next one is a line, others are arcs: forward on the right, back on the left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import svg
from flowcharts import Flowchart


def svg_of(source: str) -> str:
    """Raises ValueError for what is not in the subset."""
    kind, *lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    match kind:
        case "sequenceDiagram":
            return _Sequence(lines).svg()
        case "stateDiagram-v2":
            return "".join(_states(title, group) for title, group in _groups(lines))
        case "flowchart TB":
            return Flowchart(lines).svg()
        case _:
            raise ValueError(f"unknown kind of diagram: {kind}")


@dataclass
class _Frame:
    """An open `loop`, `alt`, `opt` or `par`."""

    title: list[str]  # its lines
    top: float
    others: list[tuple[float, str]] = field(default_factory=list)  # where an `else` begins


class _Sequence:
    """Draws from the top down; `_y` is where the next thing goes."""

    _GAP = 200.0
    _MARGIN = 100.0
    _INSET = 8.0

    def __init__(self, lines: Sequence[str]) -> None:
        self._columns: dict[str, float] = {}
        self._names: list[str] = []
        self._parts: list[str] = []
        self._frames: list[_Frame] = []
        self._y = 64.0
        for line in lines:
            self._draw(line)

    @property
    def _page_width(self) -> float:
        return self._MARGIN * 2 + self._GAP * (len(self._names) - 1)

    def svg(self) -> str:
        height = self._y + 16
        lines = [f'<path class="faint" d="M{x:.0f} 40 V{height - 8:.0f}"/>' for x in self._columns.values()]
        heads = []
        for x, name in zip(self._columns.values(), self._names, strict=True):
            half = max(50.0, svg.width([name], svg.STRONG) / 2 + 10)
            heads.append(f'<rect class="box" x="{x - half:.0f}" y="8" width="{half * 2:.0f}" height="32" rx="6"/>')
            heads.append(svg.text(x, 29, name, "strong"))
        return svg.page(self._page_width, height, f"Messages between {', '.join(self._names)}", [*lines, *heads, *self._parts])

    def _draw(self, line: str) -> None:
        if named := re.fullmatch(r"participant (\w+) as (.+)", line):
            self._columns[named[1]] = self._MARGIN + self._GAP * len(self._names)
            self._names.append(named[2])
        elif sent := re.fullmatch(r"(\w+)--?(>>|x)(\w+): (.+)", line):
            self._message(self._columns[sent[1]], self._columns[sent[3]], sent[4], arrives=sent[2] == ">>")
        elif note := re.fullmatch(r"Note over (\w+)(?:,(\w+))?: (.+)", line):
            ends = [self._columns[name] for name in (note[1], note[2] or note[1])]
            self._note(sum(ends) / 2, note[3], 44 if note[2] else 22)
        elif opened := re.fullmatch(r"(loop|alt|opt|par)\b *(.*)", line):
            room = self._page_width - 2 * self._INSET * (len(self._frames) + 1) - 20
            title = svg.wrapped(f"{opened[1]} {opened[2]}", int(room / svg.STRONG))
            self._frames.append(_Frame(title, self._y))
            self._y += 11 + svg.LINE * len(title)
        elif other := re.fullmatch(r"(?:else|and)\b *(.*)", line):
            self._frames[-1].others.append((self._y, other[1]))
            self._y += 26 if other[1] else 12
        elif line == "end":
            self._close(self._frames.pop())
        else:
            raise ValueError(f"unknown line: {line}")

    def _message(self, start: float, end: float, words: str, *, arrives: bool) -> None:
        lines = svg.wrapped(words, int(abs(end - start) / svg.CHARACTER) - 4)
        for line in lines:
            self._y += svg.LINE
            self._parts.append(svg.text((start + end) / 2, self._y - 4, line, "over"))
        self._y += 4
        reached = end if arrives else (start + end) / 2
        self._parts.append(f'<path class="arrow" d="M{start:.0f} {self._y:.0f} H{reached:.0f}"/>')
        if not arrives:
            self._parts.append(svg.text(reached + (8 if end > start else -8), self._y + 5, "\u00d7", "strong"))
        self._y += 14

    def _note(self, x: float, words: str, characters: int) -> None:
        lines = svg.wrapped(words, characters)
        width, height = svg.width(lines) + 16, len(lines) * svg.LINE + 8
        box = f'x="{x - width / 2:.0f}" y="{self._y:.0f}" width="{width:.0f}" height="{height}" rx="4"'
        self._parts += [f'<rect class="box" {box}/>', f'<rect class="note" {box}/>']
        self._parts += [svg.text(x, self._y + svg.LINE * (row + 1) - 1, line) for row, line in enumerate(lines)]
        self._y += height + 10

    def _close(self, frame: _Frame) -> None:
        inset = self._INSET * (len(self._frames) + 1)
        width = self._page_width - 2 * inset
        self._y += 2
        box = f'x="{inset:.0f}" y="{frame.top:.0f}" width="{width:.0f}" height="{self._y - frame.top:.0f}" rx="6"'
        self._parts.append(f'<rect class="line" {box}/>')
        for row, line in enumerate(frame.title, 1):
            self._parts.append(svg.text(inset + 10, frame.top + svg.LINE * row, line, "left quiet strong over"))
        for top, words in frame.others:
            self._parts.append(f'<path class="faint" d="M{inset:.0f} {top:.0f} h{width:.0f}"/>')
            self._parts.append(svg.text(inset + 10, top + 17, words, "left quiet over"))
        self._y += 12


@dataclass(frozen=True)
class _Change:
    start: str
    end: str
    why: str


def _groups(lines: Sequence[str]) -> Iterator[tuple[str, list[_Change]]]:
    """The changes of each machine of a diagram, with its title; one machine has none."""
    title, changes = "", list[_Change]()
    for line in lines:
        if opened := re.fullmatch(r'state "([^"]+)" as \w+ \{', line):
            title = opened[1]
        elif line == "}":
            yield title, changes
            title, changes = "", []
        elif change := re.fullmatch(r"(\S+) --> (\S+?)(?:: (.+))?", line):
            changes.append(_Change(change[1], change[2], change[3] or ""))
        else:
            raise ValueError(f"unknown line: {line}")
    if changes:
        yield title, changes


def _states(title: str, changes: Sequence[_Change]) -> str:
    names = list(dict.fromkeys(name for change in changes for name in (change.start, change.end)))
    names.sort(key=lambda name: name in {change.start for change in changes}, reverse=True)  # ends last
    row, half = {name: number for number, name in enumerate(names)}, max(60.0, svg.width(names, svg.STRONG) / 2 + 18)
    steps = {change: row[change.end] - row[change.start] for change in changes}
    reach = max(map(abs, steps.values())) * 18  # three quarters of where an arc points to
    back = svg.width([change.why for change, rows in steps.items() if rows < 1])
    beside = svg.width([change.why for change, rows in steps.items() if rows == 1])  # of words between two rows
    aside = max(0.0, beside + 4 - half)
    why = svg.width([change.why for change, rows in steps.items() if rows > 1])
    middle, gap, first = 20 + back + reach + half, 64 if why else 52, 48 if title else 24
    parts = [svg.text(middle, 24, title, "strong quiet")] if title else []
    for number, change in enumerate(changes):
        parts += _change(change, row[change.start], row[change.end], middle, half, aside, (first, gap), number)
    for name in names:
        y = first + row[name] * gap
        if name == "[*]":
            parts.append(f'<circle class="head" cx="{middle:.0f}" cy="{y + 15:.0f}" r="7"/>')
            continue
        box = f'x="{middle - half:.0f}" y="{y:.0f}" width="{half * 2:.0f}" height="30" rx="15"'
        parts += [f'<rect class="box" {box}/>', svg.text(middle, y + 20, name, "strong")]
    width = middle + half + aside + 24 + reach + why
    return svg.page(width, first + len(names) * gap, title or f"States: {', '.join(names)}", parts)


def _change(
    change: _Change,
    start: int,
    end: int,
    middle: float,
    half: float,
    aside: float,
    rows: tuple[float, float],
    number: int,
) -> list[str]:
    first, gap = rows
    top, bottom = first + start * gap, first + end * gap
    if end == start + 1:
        line = f'<path class="arrow" d="M{middle:.0f} {top + 30:.0f} V{bottom:.0f}"/>'
        return (
            [line, svg.text(middle + 10, (top + 30 + bottom) / 2 + 5, change.why, "left quiet over")] if change.why else [line]
        )
    side = 1 if end > start else -1
    edge = middle + side * (half if change.start != "[*]" else 8)
    into, bulge = middle + side * half, middle + side * (half + 12 + (aside * 4 / 3 if side > 0 else 0) + abs(end - start) * 24)
    shift = (number % 3 - 1) * 5
    y1, y2 = top + 15 + shift, bottom + 15 - side * 6 + shift
    path = f"M{edge:.0f} {y1:.0f} C{bulge:.0f} {y1:.0f} {bulge:.0f} {y2:.0f} {into:.0f} {y2:.0f}"
    where = (edge + 3 * bulge * 2 + into) / 8 + side * 6
    label = svg.text(where, (y1 + y2) / 2 + 5, change.why, "left quiet over" if side > 0 else "right quiet over")
    return [f'<path class="arrow" d="{path}"/>', *([label] if change.why else [])]
