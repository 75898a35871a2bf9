"""The drawings of docs/: nothing in them is cut off or lies upon another, and what they name exists."""

from __future__ import annotations

import pathlib
import re
import sys
from itertools import combinations

import documented
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from drawings import svg_of  # noqa: E402
from svg import CHARACTER, STRONG  # noqa: E402

PAGES = sorted((ROOT / "docs").glob("*.md"))
DRAWINGS = [
    pytest.param(source, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, source in enumerate(re.findall(r"```mermaid\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]
FLOWCHARTS = [drawing for drawing in DRAWINGS if str(drawing.values[0]).startswith("flowchart")]

Area = tuple[float, float, float, float]  # left, top, right, bottom


def boxes(drawn: str) -> list[Area]:
    sizes = re.findall(r'<rect class="box" x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', drawn)
    return [(x, y, x + width, y + height) for x, y, width, height in (map(float, size) for size in sizes)]


def texts(drawn: str) -> list[Area]:
    found = []
    for x, y, kind, words in re.findall(r'<text x="(\S+)" y="(\S+)" class="(.*?)">(.*?)</text>', drawn):
        width = len(re.sub(r"&\w+;|&#\w+;", "x", words)) * (STRONG if "strong" in kind else CHARACTER)
        left = float(x) - (0 if "left" in kind else width if "right" in kind else width / 2)
        found.append((left, float(y) - 12, left + width, float(y) + 3))
    return found


def lie_upon_each_other(one: Area, other: Area) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("source", DRAWINGS)
def test_nothing_is_cut_off_and_boxes_stand_apart(source: str) -> None:
    for drawn in svg_of(source).split("</svg>")[:-1]:
        width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)" role', drawn)[0])
        for left, top, right, bottom in boxes(drawn) + texts(drawn):
            assert 0 <= left <= right <= width
            assert 0 <= top < bottom <= height
        assert not [pair for pair in combinations(boxes(drawn), 2) if lie_upon_each_other(*pair)]


@pytest.mark.parametrize("source", FLOWCHARTS)
def test_the_words_of_a_flowchart_stand_apart(source: str) -> None:
    drawn = svg_of(source)
    assert not [pair for pair in combinations(texts(drawn), 2) if lie_upon_each_other(*pair)]


@pytest.mark.parametrize("source", FLOWCHARTS)
def test_what_a_flowchart_names_exists(source: str) -> None:
    """Classes, functions as `Class.name` or `module.name`, packages and options."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "kvrelay").rglob("*.py"))
    known = set(re.findall(r"\w+", code))
    labels = " ".join(re.findall(r'"([^"]+)"', source)).replace("<br>", " ")
    assert {name for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", labels) if name not in known} == set()
    assert {name for name in re.findall(r"\b\w+\.(\w+)", labels) if f"def {name}(" not in code} == set()
    assert {name for name in re.findall(r"\b(\w+)/", labels) if not (ROOT / "kvrelay" / name).is_dir()} == set()
    options = {option for command in documented.COMMANDS for option in documented.options_of(command)}
    assert set(re.findall(r"--[a-z-]+", labels)) <= options


def test_a_box_is_below_those_before_it_and_an_arrow_may_go_up() -> None:
    drawn = svg_of('flowchart TB\nA["one"]\nB["two"]\nC["three"]\nA -->|"go"| B\nC --> B\nC -->|"back"| A\n')
    tops = [top for _, top, _, _ in boxes(drawn)]
    assert tops == sorted(tops)
    starts = [float(y) for y in re.findall(r'<path class="arrow" d="M\S+ (\S+) ', drawn)]
    assert starts[1:] == [tops[2], tops[2]]


@pytest.mark.parametrize("line", ["A -- B", 'A("round")', "A --> B"])
def test_what_cannot_be_drawn_is_refused(line: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        svg_of(f'flowchart TB\nA["one"]\n{line}\n')


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_drawing_is_left_in_characters(page: pathlib.Path) -> None:
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        assert kind or not re.search(r"\+--|--\+|--> |^ *\| *$", block, re.MULTILINE), block
