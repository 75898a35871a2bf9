"""The two-stage benchmark as a drawing: time to first token and wall time of each way, calm and under pressure. Plain SVG."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Mapping
from typing import Protocol
from xml.sax.saxutils import escape

from kvrelay.errors import ConfigError

_WIDTH, _HEIGHT = 860, 400
_TOP, _BOTTOM, _LEFT = 70, 50, 60
_PANEL = 380  # width of one
_COLOURS = ("#1f77b4", "#d62728")
_NAMES = ("calm", "after a burst of other traffic")


class Shown(Protocol):
    @property
    def ttft_s(self) -> list[float]: ...

    @property
    def wall_s(self) -> float: ...


def write_plot(path: pathlib.Path, calm: Mapping[str, Shown], pressed: Mapping[str, Shown]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw(calm, pressed), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error


def draw(calm: Mapping[str, Shown], pressed: Mapping[str, Shown]) -> str:
    ttft = [{way: statistics.median(shown.ttft_s) * 1e3 for way, shown in each.items()} for each in (calm, pressed)]
    wall = [{way: shown.wall_s for way, shown in each.items()} for each in (calm, pressed)]
    legend = [
        f'<rect x="{_LEFT + place * 120}" y="34" width="10" height="10" fill="{colour}"/>'
        f'<text x="{_LEFT + 16 + place * 120}" y="43">{name}</text>'
        for place, (name, colour) in enumerate(zip(_NAMES, _COLOURS, strict=True))
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_panel(_LEFT, "Stage 2: time to first token, ms (logarithmic)", ttft, logarithmic=True),
        *_panel(_LEFT + _PANEL + 40, "Both stages: wall time, s", wall, logarithmic=False),
        *legend,
    ]
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: float, title: str, series: list[dict[str, float]], *, logarithmic: bool) -> list[str]:
    values = [value for each in series for value in each.values()]
    low = math.floor(math.log10(min(values))) if logarithmic else 0.0
    high = max(low + 1, math.ceil(math.log10(max(values)))) if logarithmic else max(values) * 1.1
    bottom, height = _HEIGHT - _BOTTOM, _HEIGHT - _TOP - _BOTTOM
    parts = [
        f'<text x="{left}" y="20" font-size="15">{escape(title)}</text>',
        f'<line x1="{left}" y1="{bottom}" x2="{left + _PANEL}" y2="{bottom}" stroke="#999"/>',
    ]
    group = _PANEL / len(series[0])
    for place, way in enumerate(series[0]):
        middle = left + (place + 0.5) * group
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(way)}</text>')
        for index, each in enumerate(series):
            value = each[way]
            share = ((math.log10(value) if logarithmic else value) - low) / (high - low)
            x, tall = middle + (index - 1) * 32, max(1.0, share * height)
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - tall:.1f}" width="28" height="{tall:.1f}" fill="{_COLOURS[index]}"/>'
                f'<text x="{x + 14:.1f}" y="{bottom - tall - 5:.1f}" text-anchor="middle" font-size="11">{value:.3g}</text>'
            )
    return parts
