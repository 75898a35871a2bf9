"""docs/embedding_relay.md draws what is there: every message with its direction and fields, every edge, tests that exist."""

from __future__ import annotations

import pathlib
import re
import typing

import msgspec
import pytest

from kvrelay.states import EMBEDDING_EDGES, EmbeddingState
from kvrelay.wire import embedding

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "embedding_relay.md").read_text(encoding="utf-8")
TO = {"producer": typing.get_args(embedding.ToProducer), "consumer": typing.get_args(embedding.ToConsumer)}
NAMES = {side: {message.__name__ for message in messages} for side, messages in TO.items()}
TYPES = {message.__name__: typing.get_origin(message) or message for messages in TO.values() for message in messages}
ARROWS = re.findall(r"^\s*([CP])->>([CP]): (\w+)\(([\w, ]*)\)$", PAGE, re.MULTILINE)


def test_every_arrow_of_the_diagrams_is_understood() -> None:
    assert len(ARROWS) == len(re.findall("->>", PAGE))


@pytest.mark.parametrize(("side", "letter"), [("producer", "P"), ("consumer", "C")])
def test_the_diagrams_draw_every_message_in_its_direction_and_no_other(side: str, letter: str) -> None:
    assert {name for _, target, name, _ in ARROWS if target == letter} == NAMES[side]


@pytest.mark.parametrize("arrow", sorted(set(ARROWS)), ids=lambda arrow: f"{arrow[0]}{arrow[2]}")
def test_a_drawn_message_has_the_fields_of_its_type(arrow: tuple[str, str, str, str]) -> None:
    _, _, name, fields = arrow
    assert [field.strip() for field in fields.split(",")] == [field.name for field in msgspec.structs.fields(TYPES[name])]


def test_the_message_table_lists_every_message_once_with_its_receiver() -> None:
    table = PAGE.split("## Messages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (producer|consumer|both) \|", table, re.MULTILINE)
    shared = NAMES["producer"] & NAMES["consumer"]
    assert sorted(rows) == sorted(
        {(name, "both" if name in shared else side) for side, names in NAMES.items() for name in names}
    )


def test_the_state_diagram_is_the_edges() -> None:
    [diagram] = re.findall(r"stateDiagram-v2\n(.*?)```", PAGE, re.DOTALL)
    drawn = re.findall(r"(\w+) --> (\w+)", diagram)
    assert sorted(drawn) == sorted((state.value, after.value) for state, many in EMBEDDING_EDGES.items() for after in many)


@pytest.mark.parametrize("state", EmbeddingState)
def test_every_state_is_explained(state: EmbeddingState) -> None:
    assert f"| `{state.value}` |" in PAGE


def test_the_notes_scenarios_name_tests_that_exist() -> None:
    source = (pathlib.Path(__file__).parent / "test_embedding_scenarios.py").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) == 7
    assert [name for name in named if f"def {name}(" not in source] == []
