"""The drawings of benchmarks: panels side by side, with dots over time or with bars. Plain SVG."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never
from xml.sax.saxutils import escape

from kvrelay.bench.harness.report import percentile, write_file

_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 60, _HEIGHT - 50
_GAP = 40  # between panels
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


@dataclass(frozen=True)
class Lines:
    """Points (x, share from 0 to 1) of each name."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]


Panel = Dots | Bars | Lines


def write_plot(path: pathlib.Path, panels: Sequence[Panel]) -> None:
    write_file("--plot", path, draw(panels).encode())


def draw(panels: Sequence[Panel]) -> str:
    width = (_WIDTH - _LEFT - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for place, panel in enumerate(panels):
        left = _LEFT + place * (width + _GAP)
        parts.append(_text(left, 20, panel.title, "start", size=15))
        match panel:
            case Dots():
                parts += _dots(panel, left, left + width)
            case Bars():
                parts += _bars(panel, left, left + width)
            case Lines():
                parts += _lines(panel, left, left + width)
            case _:
                assert_never(panel)
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> range:
    """Powers of ten from below the smallest value to above the largest."""
    low = math.floor(math.log10(max(min(values), 0.1)))
    return range(low, max(low + 1, math.ceil(math.log10(max(values)))) + 1)


def _height(values: Sequence[float], *, logarithmic: bool) -> Callable[[float], float]:
    """Where a value is, from the top of the drawing."""
    decades = _decades(values)
    low, high = (decades[0], decades[-1]) if logarithmic else (0.0, max(values) * 1.1)

    def y(value: float) -> float:
        place = math.log10(max(value, 10.0**low)) if logarithmic else value
        return _BOTTOM - (place - low) / (high - low) * (_BOTTOM - _TOP)

    return y


def _dots(panel: Dots, left: float, right: float) -> list[str]:
    values = [value for points in panel.series.values() for _, value in points]
    y = _height(values, logarithmic=True)
    end_s = max(at for points in panel.series.values() for at, _ in points)
    scale = (right - left) / end_s
    parts = []
    for value in (10.0**decade for decade in _decades(values)):
        parts += [_line(left, right, y(value), "#ddd"), _text(left - 8, y(value) + 4, f"{value:g} ms", "end")]
    parts += [_text(left + scale * at_s, _BOTTOM + 18, f"{at_s:.0f} s") for at_s in (end_s * tick / 5 for tick in range(6))]
    for index, (name, points) in enumerate(panel.series.items()):
        p99 = percentile([value for _, value in points], 99)
        path = "".join(f"M{left + scale * at:.1f} {y(value):.1f}h0" for at, value in points)
        style = f'stroke="{_COLOURS[index]}" stroke-width="3" stroke-linecap="round" stroke-opacity="0.35" fill="none"'
        parts += [f'<path d="{path}" {style}/>', _line(left, right, y(p99), _COLOURS[index], ' stroke-dasharray="6 4"')]
        parts += _legend(left + 330 * index, index, f"{name}: p99 {p99:.0f} ms (dashed)")
    return parts


def _bars(panel: Bars, left: float, right: float) -> list[str]:
    y = _height([value for each in panel.series.values() for value in each.values()], logarithmic=panel.logarithmic)
    parts = [_line(left, right, _BOTTOM, "#999")]
    for index, (name, values) in enumerate(panel.series.items()):
        parts += _legend(left + 120 * index, index, name)
        for place, (group, value) in enumerate(values.items()):
            middle = left + (place + 0.5) * (right - left) / len(values)
            x, top = middle + (index - 1) * 32, min(_BOTTOM - 1, y(value))
            parts.append(f'<rect x="{x:.1f}" y="{top:.1f}" width="28" height="{_BOTTOM - top:.1f}" fill="{_COLOURS[index]}"/>')
            parts.append(_text(x + 14, top - 5, f"{value:.3g}", size=11))
            if index == 0:
                parts.append(_text(middle, _BOTTOM + 18, group))
    return parts


def _lines(panel: Lines, left: float, right: float) -> list[str]:
    ticks = sorted({x for points in panel.series.values() for x, _ in points})
    places = {x: left + (number + 0.5) * (right - left) / len(ticks) for number, x in enumerate(ticks)}
    parts = [_text(place, _BOTTOM + 18, f"{x:g}") for x, place in places.items()]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _BOTTOM - share * (_BOTTOM - _TOP)
        parts += [_line(left, right, y, "#ddd"), _text(left - 8, y + 4, f"{share:.0%}", "end")]
    for index, (name, points) in enumerate(panel.series.items()):
        path = " ".join(f"{places[x]:.1f},{_BOTTOM - share * (_BOTTOM - _TOP):.1f}" for x, share in points)
        parts.append(f'<polyline points="{path}" stroke="{_COLOURS[index]}" stroke-width="2" fill="none"/>')
        parts += _legend(left + 120 * index, index, name)
    return parts


def _legend(x: float, index: int, text: str) -> list[str]:
    square = f'<rect x="{x:.1f}" y="32" width="10" height="10" fill="{_COLOURS[index]}"/>'
    return [square, _text(x + 16, 41, text, "start")]


def _line(left: float, right: float, y: float, colour: str, style: str = "") -> str:
    return f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="{colour}"{style}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
