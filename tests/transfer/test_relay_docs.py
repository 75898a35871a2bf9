"""docs/relay.md draws what is there: every message with its direction and fields, every edge between states, and no other."""

from __future__ import annotations

import pathlib
import re
import typing

import msgspec
import pytest

from kvrelay.states import CONSUMER_EDGES, PRODUCER_EDGES
from kvrelay.transfer.kv import plan
from kvrelay.wire import kv

PAGE = (pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "relay.md").read_text(encoding="utf-8")
TO = {"producer": typing.get_args(kv.ToProducer), "consumer": typing.get_args(kv.ToConsumer)}
TYPES = {message.__name__: typing.get_origin(message) or message for messages in TO.values() for message in messages}
NAMES = {side: {message.__name__ for message in messages} for side, messages in TO.items()}
ARROWS = re.findall(r"^\s*([CP])->>([CP]): (\w+)\(([\w, ]*)\)$", PAGE, re.MULTILINE)


def test_every_arrow_of_the_diagrams_is_understood() -> None:
    assert len(ARROWS) == len(re.findall("->>", PAGE))


@pytest.mark.parametrize(("side", "letter"), [("producer", "P"), ("consumer", "C")])
def test_the_diagrams_draw_every_message_in_its_direction_and_no_other(side: str, letter: str) -> None:
    assert {name for _, target, name, _ in ARROWS if target == letter} == NAMES[side]


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: f"{arrow[0]}{arrow[2]}")
def test_a_drawn_message_has_the_fields_of_its_type(arrow: tuple[str, str, str, str]) -> None:
    _, _, name, fields = arrow
    drawn = {field.strip() for field in fields.split(",")}
    assert drawn == {field.name for field in msgspec.structs.fields(TYPES[name])}


def test_the_message_table_lists_every_message_once_with_its_receiver() -> None:
    table = PAGE.split("## Messages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (producer|consumer|both) \|", table, re.MULTILINE)
    expected = {
        name: "both" if name in NAMES["producer"] & NAMES["consumer"] else side
        for side, names in NAMES.items()
        for name in names
    }
    assert dict(rows) == expected
    assert len(rows) == len(expected)


@pytest.mark.parametrize(("number", "edges"), [(0, PRODUCER_EDGES), (1, CONSUMER_EDGES)], ids=["producer", "consumer"])
def test_the_state_diagrams_are_the_edges(number: int, edges: dict[typing.Any, frozenset[typing.Any]]) -> None:
    diagram = re.findall(r"stateDiagram-v2\n(.*?)```", PAGE, re.DOTALL)[number]
    drawn = set(re.findall(r"(\w+) --> (\w+)", diagram))
    assert drawn == {(state.value, following.value) for state, many in edges.items() for following in many}


@pytest.mark.parametrize("name", ["TransferMeta", "LayerPlan"])
def test_the_counterparts_of_the_design_notes_names_exist(name: str) -> None:
    assert f"`{name}`" in PAGE
    assert isinstance(getattr(plan, name), type)
