"""Times between tokens as a drawing: one dot a token, over time, on a logarithmic scale. Plain SVG."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass
from xml.sax.saxutils import escape

from kvrelay.bench.report import percentile
from kvrelay.errors import ConfigError

_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 60, 50
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c")


@dataclass(frozen=True)
class Series:
    """Seconds since the start, and the gap in seconds."""

    name: str
    points: list[tuple[float, float]]

    @property
    def p99_s(self) -> float:
        return percentile([gap for _, gap in self.points], 99)


def write_plot(path: pathlib.Path, series: list[Series]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw(series), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error


def draw(series: list[Series]) -> str:
    scale = _Scale(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">Time between tokens of running requests while long prompts arrive</text>',
        *_axes(scale),
    ]
    for index, (each, colour) in enumerate(zip(series, _COLOURS, strict=False)):
        parts += _one(each, colour, index, scale)
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Seconds and gaps to points of the image. Gaps run over whole decades of milliseconds."""

    def __init__(self, series: list[Series]) -> None:
        gaps_ms = [gap * 1e3 for each in series for _, gap in each.points]
        self.end_s = max(at for each in series for at, _ in each.points)
        self.low = math.floor(math.log10(max(min(gaps_ms), 0.1)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(gaps_ms))))

    def x(self, at_s: float) -> float:
        return _LEFT + at_s / self.end_s * (_WIDTH - _LEFT - _RIGHT)

    def y(self, gap_ms: float) -> float:
        share = (math.log10(max(gap_ms, 10**self.low)) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for decade in range(scale.low, scale.high + 1):
        y = scale.y(10.0**decade)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g} ms</text>')
    for tick in range(6):
        at_s = scale.end_s * tick / 5
        parts.append(f'<text x="{scale.x(at_s):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{at_s:.0f} s</text>')
    return parts


def _one(series: Series, colour: str, index: int, scale: _Scale) -> list[str]:
    p99_ms = series.p99_s * 1e3
    y = scale.y(p99_ms)
    legend_x = _LEFT + 8 + index * 330
    dots = "".join(f"M{scale.x(at):.1f} {scale.y(gap * 1e3):.1f}h0" for at, gap in series.points)
    return [
        f'<path d="{dots}" stroke="{colour}" stroke-width="3" stroke-linecap="round" stroke-opacity="0.35" fill="none"/>',
        f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{colour}" stroke-dasharray="6 4"/>',
        f'<rect x="{legend_x}" y="32" width="10" height="10" fill="{colour}"/>',
        f'<text x="{legend_x + 16}" y="41">{escape(series.name)}: p99 {p99_ms:.0f} ms (dashed)</text>',
    ]
