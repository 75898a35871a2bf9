"""The drawings of benchmarks: panels with dots over time or with bars, side by side. Plain SVG.

A panel has a name for each colour; its values run over whole decades (logarithmic), or from zero.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from kvrelay.bench.harness.report import percentile, write_file

_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 60, 50
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c")


@dataclass(frozen=True)
class Dots:
    """Points (seconds since the start, milliseconds) of each name; 99th percentiles are dashed."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Bars:
    """For each name, the value of each group."""

    title: str
    series: Mapping[str, Mapping[str, float]]
    logarithmic: bool


def write_plot(path: pathlib.Path, panels: Sequence[Dots | Bars]) -> None:
    write_file("--plot", path, draw(panels).encode())


def draw(panels: Sequence[Dots | Bars]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    width = (_WIDTH - _LEFT - _RIGHT) / len(panels)
    for place, panel in enumerate(panels):
        left = _LEFT + place * width
        parts.append(_text(left, 20, panel.title, "start", size=15))
        area = _Area(left, width if place == len(panels) - 1 else width - 40)
        parts += _dots(panel, area) if isinstance(panel, Dots) else _bars(panel, area)
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Area:
    """Where a panel's values are drawn."""

    left: float
    width: float
    top: float = _TOP
    bottom: float = _HEIGHT - _BOTTOM

    @property
    def right(self) -> float:
        return self.left + self.width

    def y(self, value: float, low: float, high: float) -> float:
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low = math.floor(math.log10(max(min(values), 0.1)))
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def _dots(panel: Dots, area: _Area) -> list[str]:
    low, high = _decades([value for points in panel.series.values() for _, value in points])
    end_s = max(at for points in panel.series.values() for at, _ in points)
    parts: list[str] = []

    def x(at_s: float) -> float:
        return area.left + at_s / end_s * area.width

    def y(value: float) -> float:
        return area.y(math.log10(max(value, 10**low)), low, high)

    for decade in range(low, high + 1):
        parts.append(_line(area, y(10.0**decade), "#ddd"))
        parts.append(_text(area.left - 8, y(10.0**decade) + 4, f"{10.0**decade:g} ms", "end"))
    for at_s in (end_s * tick / 5 for tick in range(6)):
        parts.append(_text(x(at_s), area.bottom + 18, f"{at_s:.0f} s"))
    names = []
    for (name, points), colour in zip(panel.series.items(), _COLOURS, strict=False):
        p99 = percentile([value for _, value in points], 99)
        path = "".join(f"M{x(at):.1f} {y(value):.1f}h0" for at, value in points)
        parts.append(
            f'<path d="{path}" stroke="{colour}" stroke-width="3" stroke-linecap="round" stroke-opacity="0.35" fill="none"/>'
        )
        parts.append(_line(area, y(p99), colour, dashed=True))
        names.append(f"{name}: p99 {p99:.0f} ms (dashed)")
    return parts + _legend(area, names, apart=330)


def _bars(panel: Bars, area: _Area) -> list[str]:
    values = [value for each in panel.series.values() for value in each.values()]
    low, high = _decades(values) if panel.logarithmic else (0.0, max(values) * 1.1)
    groups = list(next(iter(panel.series.values())))
    parts = [_line(area, area.bottom, "#999")]
    for place, group in enumerate(groups):
        middle = area.left + (place + 0.5) * area.width / len(groups)
        parts.append(_text(middle, area.bottom + 18, group))
        for index, each in enumerate(panel.series.values()):
            x = middle + (index - 1) * 32
            y = min(area.bottom - 1, area.y(math.log10(each[group]) if panel.logarithmic else each[group], low, high))
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="28" height="{area.bottom - y:.1f}" fill="{_COLOURS[index]}"/>')
            parts.append(_text(x + 14, y - 5, f"{each[group]:.3g}", size=11))
    return parts + _legend(area, list(panel.series), apart=120)


def _legend(area: _Area, names: Sequence[str], apart: int) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x = area.left + index * apart
        parts.append(f'<rect x="{x:.1f}" y="32" width="10" height="10" fill="{_COLOURS[index]}"/>')
        parts.append(_text(x + 16, 41, name, "start"))
    return parts


def _line(area: _Area, y: float, colour: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<line x1="{area.left:.1f}" y1="{y:.1f}" x2="{area.right:.1f}" y2="{y:.1f}" stroke="{colour}"{dashes}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
