"""What all drawings of the site are made of: a page, text of about known width, and colours that follow the theme."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

CHARACTER = 7.2  # of 13 px text, in the widest of the usual fonts
STRONG = 8.2
LINE = 17
_SMALLEST = 0.72  # of its size: on a phone a wider drawing is moved sideways, in its own frame
_STYLE = """<style>
.drawing { width: 100%; height: auto; display: block; margin: 0 auto; font: 13px system-ui, sans-serif; }
.drawing text { fill: var(--md-default-fg-color, #222); text-anchor: middle; }
.drawing .left { text-anchor: start; } .drawing .right { text-anchor: end; } .drawing .strong { font-weight: 600; }
.drawing .quiet { fill: var(--md-default-fg-color--light, #555); }
.drawing .over { paint-order: stroke; stroke: var(--md-default-bg-color, #fff); stroke-width: 5px; }
.drawing .box { fill: var(--md-code-bg-color, #f5f5f5); stroke: var(--md-default-fg-color--light, #777); }
.drawing .note { fill: var(--md-accent-fg-color--transparent, #eef2ff); stroke: none; }
.drawing .line { fill: none; stroke: var(--md-default-fg-color--light, #777); }
.drawing .faint { fill: none; stroke: var(--md-default-fg-color--lighter, #bbb); stroke-dasharray: 4 4; }
.drawing .arrow { fill: none; stroke: var(--md-typeset-a-color, #3f51b5); stroke-width: 1.5; marker-end: url(#head); }
.drawing .both { marker-start: url(#head); } .drawing .dotted { stroke-dasharray: 3 4; }
.drawing .thick { stroke-width: 4; marker-end: url(#wide); } .drawing .thick.both { marker-start: url(#wide); }
.drawing .head { fill: var(--md-typeset-a-color, #3f51b5); }
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path class="head" d="M0 0 L8 4 L0 8 Z"/></marker>
<marker id="wide" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="4" markerHeight="4" orient="auto-start-reverse">
<path class="head" d="M0 0 L8 4 L0 8 Z"/></marker></defs>"""


def page(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """A small drawing is not blown up, a large one stays readable. Blank lines would end a block of HTML in Markdown."""
    size = f"max-width: {width:.0f}px; min-width: {width * _SMALLEST:.0f}px"
    head = f'<svg class="drawing" style="{size}" viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
    return "\n".join([f'{head} aria-label="{html.escape(label)}">', _STYLE, *parts, "</svg>"])


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{html.escape(words)}</text>'


def width(lines: Sequence[str], character: float = CHARACTER) -> float:
    return max((len(line) for line in lines), default=0) * character


def wrapped(words: str, characters: int) -> list[str]:
    return textwrap.wrap(words, characters, break_long_words=False, break_on_hyphens=False)
