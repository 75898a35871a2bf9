"""Boxes and arrows, as Mermaid's `flowchart TB` has them, narrow enough for a phone.

    subgraph R["router process"]       a frame around the boxes up to its `end`
    A["<b>name</b><br>what it does"]   a box
    A -->|"words"| B                   an arrow; also `<-->`, thick `==>` and `<==>`, dotted `-.->`; `~~~` is not drawn

A box stands a row below the lowest of the boxes before it with which it has an arrow; a row shares the width evenly. So an
arrow goes up if it leads to a box that was written before. An arrow that passes rows does so beside their boxes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import svg

WIDTH = 400.0
_LANE = 22.0  # of an arrow that passes a row
_INSET, _PAD = 16.0, 10.0  # between a box and the edge of its cell, between a box and its words
_TITLE, _FOOT, _GAP = 30.0, 12.0, 28.0
_ARROW = re.compile(r'(\w+) (<?)(-->|==>|-\.->|~~~)(?:\|"?([^|"]+)"?\|)? (\w+)')
_KINDS = {"-->": "arrow", "==>": "arrow thick", "-.->": "arrow dotted", "~~~": ""}


@dataclass(eq=False)
class _Box:
    """A box; without words, the place where an arrow passes a row."""

    words: str
    row: int = 0
    cell: tuple[float, float] = (0.0, 0.0)
    lines: list[tuple[str, str]] = field(default_factory=list)  # and how they look
    half: float = 0.0
    top: float = 0.0

    @property
    def x(self) -> float:
        return sum(self.cell) / 2

    @property
    def height(self) -> float:
        return len(self.lines) * svg.LINE + 2 * _PAD

    def fit(self, *, is_wide: bool) -> None:
        """Into its cell; a wide one fills it."""
        room = self.cell[1] - self.cell[0] - 2 * _INSET
        for line in self.words.split("<br>"):
            is_strong = line.startswith("<b>")
            size = svg.STRONG if is_strong else svg.CHARACTER
            pieces = svg.wrapped(re.sub(r"</?b>", "", line), int((room - 2 * _PAD) / size))
            self.half = max(self.half, room / 2 if is_wide else max(48.0, svg.width(pieces, size) / 2 + _PAD))
            self.lines += [(piece, "strong" if is_strong else "") for piece in pieces]

    def within(self, x: float) -> float:
        return min(max(x, self.x - self.half + 12), self.x + self.half - 12)


@dataclass(eq=False)
class _Arrow:
    start: _Box
    end: _Box
    kind: str
    words: str
    is_both: bool
    lanes: list[_Box] = field(default_factory=list)
    label: list[str] = field(default_factory=list)  # the lines of its words,
    label_x: float = 0.0  # and their middle

    @property
    def ends(self) -> tuple[_Box, _Box]:
        """The upper one first."""
        return (self.start, self.end) if self.start.row < self.end.row else (self.end, self.start)


@dataclass(eq=False)
class _Frame:
    title: str
    boxes: list[_Box] = field(default_factory=list)

    @property
    def rows(self) -> tuple[int, int]:
        return min(box.row for box in self.boxes), max(box.row for box in self.boxes)


class Flowchart:
    def __init__(self, lines: Sequence[str]) -> None:
        self._boxes: dict[str, _Box] = {}
        self._arrows: list[_Arrow] = []
        self._frames: list[_Frame] = []
        self._open: _Frame | None = None
        for line in lines:
            self._read(line)
        self._rows = self._in_rows()
        self._tops = [0.0] * len(self._rows)
        for row in self._rows:
            self._place_across(row)
        for number in range(1, len(self._rows)):
            self._label(number)
        self._height = self._place_down()

    def svg(self) -> str:
        drawn = [arrow for arrow in self._arrows if arrow.kind]
        parts = [part for frame in self._frames for part in self._framed(frame)]
        parts += [f'<path class="{arrow.kind}{" both" * arrow.is_both}" d="{self._path(arrow)}"/>' for arrow in drawn]
        parts += [part for box in self._boxes.values() for part in _boxed(box)]
        parts += [part for arrow in drawn for part in self._labelled(arrow)]
        parts += [svg.text(*self._title_at(frame), frame.title, "left quiet strong over") for frame in self._frames]
        names = [frame.title for frame in self._frames] or [re.sub(r"<.*?>", " ", box.words) for box in self._boxes.values()]
        return svg.page(WIDTH, self._height, f"Boxes and arrows: {', '.join(names)}", parts)

    # Reading

    def _read(self, line: str) -> None:
        if opened := re.fullmatch(r'subgraph \w+\["([^"]+)"\]', line):
            self._open = _Frame(opened[1])
            self._frames.append(self._open)
        elif line == "end":
            self._open = None
        elif box := re.fullmatch(r'(\w+)\["([^"]+)"\]', line):
            self._boxes[box[1]] = _Box(box[2])
            if self._open is not None:
                self._open.boxes.append(self._boxes[box[1]])
        elif arrow := _ARROW.fullmatch(line):
            start, end = self._boxes[arrow[1]], self._boxes[arrow[5]]
            self._arrows.append(_Arrow(start, end, _KINDS[arrow[3]], arrow[4] or "", bool(arrow[2])))
        else:
            raise ValueError(f"unknown line: {line}")

    def _in_rows(self) -> list[list[_Box]]:
        seen: list[_Box] = []
        for box in self._boxes.values():
            others = [arrow.end if arrow.start is box else arrow.start for arrow in self._of(box)]
            box.row = max((other.row + 1 for other in others if other in seen), default=0)
            seen.append(box)
        rows: list[list[_Box]] = [[] for _ in range(max(box.row for box in seen) + 1)]
        for box in seen:
            rows[box.row].append(box)
        num_passing = 0
        for arrow in self._arrows:
            upper, lower = arrow.ends
            passed = rows[upper.row + 1 : lower.row] if arrow.kind else []
            boxes = [box for box in rows[upper.row] if box.words]
            is_left = upper is boxes[0] if len(boxes) > 1 else bool(num_passing % 2)
            num_passing += bool(passed)
            for row in passed:
                arrow.lanes.append(_Box(""))
                row.insert(0 if is_left else len(row), arrow.lanes[-1])
        return rows

    def _of(self, box: _Box) -> list[_Arrow]:
        return [arrow for arrow in self._arrows if box in (arrow.start, arrow.end)]

    # Placing

    def _place_across(self, row: Sequence[_Box]) -> None:
        share = (WIDTH - _LANE * sum(not box.words for box in row)) / sum(bool(box.words) for box in row)
        x = 0.0
        for box in row:
            box.cell = (x, x + (share if box.words else _LANE))
            x = box.cell[1]
            if box.words:
                above = sum(arrow.ends[1] is box for arrow in self._of(box))
                box.fit(is_wide=above > 1 or len(self._of(box)) - above > 1)

    def _label(self, number: int) -> None:
        """Breaks the words of the arrows that end in a row: each has the room up to the middle between it and the next."""
        arrows = sorted((arrow for arrow in self._arrows if arrow.kind and arrow.ends[1].row == number), key=self._middle)
        middles = [self._middle(arrow) for arrow in arrows]
        borders = [0.0, *((left + right) / 2 for left, right in pairwise(middles)), WIDTH]
        for place, arrow in enumerate(arrows):
            left, right = borders[place] + 4, borders[place + 1] - 4
            arrow.label = svg.wrapped(arrow.words, max(8, int((right - left) / svg.CHARACTER)))
            half = svg.width(arrow.label) / 2
            arrow.label_x = min(max(middles[place], left + half), right - half)

    def _middle(self, arrow: _Arrow) -> float:
        return sum(self._ways(arrow)[-2:]) / 2

    def _ways(self, arrow: _Arrow) -> list[float]:
        """Where it leaves the upper box, passes rows, and reaches the lower box."""
        upper, lower = arrow.ends
        if arrow.lanes:
            lanes = [lane.x for lane in arrow.lanes]
            return [upper.within(lanes[0]), *lanes, lower.within(lanes[-1])]
        beside = [other for other in self._of(upper) if other in self._of(lower)]
        left, right = max(upper.x - upper.half, lower.x - lower.half), min(upper.x + upper.half, lower.x + lower.half)
        if left > right:
            return [upper.within(lower.x), lower.within(upper.x)]
        x = left + (right - left) * (beside.index(arrow) + 0.5) / len(beside)
        return [upper.within(x), lower.within(x)]

    def _place_down(self) -> float:
        """Returns the height of it all."""
        y = 4.0
        for number, row in enumerate(self._rows):
            y += self._above(number) + _TITLE * any(frame.rows[0] == number for frame in self._frames)
            self._tops[number] = y
            height = max(box.height for box in row)
            for box in row:
                box.top = y + (height - box.height) / 2
            y += height + _FOOT * any(frame.rows[1] == number for frame in self._frames)
        return y + 4

    def _above(self, number: int) -> float:
        """Room for arrows and their words."""
        labels = [arrow.label for arrow in self._arrows if arrow.ends[1].row == number]
        return _GAP + max(map(len, labels)) * svg.LINE if labels else 0.0

    # Drawing

    def _path(self, arrow: _Arrow) -> str:
        (upper, lower), (first, *_, last) = arrow.ends, self._ways(arrow)
        points = [(first, upper.top + upper.height)]
        for lane in arrow.lanes:
            row = next(row for row in self._rows if lane in row)
            points += [(lane.x, min(box.top for box in row)), (lane.x, max(box.top + box.height for box in row))]
        points.append((last, lower.top))
        return "".join(_segments(points if arrow.start is upper else points[::-1]))

    def _labelled(self, arrow: _Arrow) -> Iterator[str]:
        row = arrow.ends[1].row
        bottom = self._tops[row] - _TITLE * any(frame.rows[0] == row for frame in self._frames)
        top = bottom - self._above(row) / 2 - len(arrow.label) * svg.LINE / 2
        for number, line in enumerate(arrow.label):
            yield svg.text(arrow.label_x, top + (number + 1) * svg.LINE - 4, line, "quiet over")

    def _title_at(self, frame: _Frame) -> tuple[float, float]:
        return min(box.cell[0] for box in frame.boxes) + 15, self._tops[frame.rows[0]] - _TITLE + 20

    def _framed(self, frame: _Frame) -> Iterator[str]:
        left, right = min(box.cell[0] for box in frame.boxes) + 3, max(box.cell[1] for box in frame.boxes) - 3
        top = self._tops[frame.rows[0]] - _TITLE
        height = max(box.top + box.height for box in self._rows[frame.rows[1]]) + _FOOT - top
        yield f'<rect class="line" x="{left:.0f}" y="{top:.0f}" width="{right - left:.0f}" height="{height:.0f}" rx="8"/>'


def _segments(points: Sequence[tuple[float, float]]) -> Iterator[str]:
    yield "M{:.0f} {:.0f}".format(*points[0])
    for (x1, y1), (x2, y2) in pairwise(points):
        middle = (y1 + y2) / 2
        yield f" V{y2:.0f}" if x1 == x2 else f" C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"


def _boxed(box: _Box) -> Iterator[str]:
    size = f'width="{box.half * 2:.0f}" height="{box.height:.0f}"'
    yield f'<rect class="box" x="{box.x - box.half:.0f}" y="{box.top:.0f}" {size} rx="6"/>'
    for number, (line, kind) in enumerate(box.lines):
        yield svg.text(box.x, box.top + _PAD + svg.LINE * (number + 1) - 4, line, kind)
