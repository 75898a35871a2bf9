"""What strangers cause cannot fill a log."""

from __future__ import annotations

import logging

import pytest

from kvrelay import log as logging_module
from kvrelay.log import Log, configure, take_over


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the log believes have passed."""
    now = [100.0]
    monkeypatch.setattr(logging_module.time, "monotonic", lambda: now[0])
    return now


def test_a_warning_that_repeats_has_one_line_which_counts_the_others(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", "router")
    log = Log("test")
    for number in range(1000):
        log.seldom("refused", number=number)
    log.seldom("refused for another reason")
    clock[0] += logging_module.SELDOM_S
    log.seldom("refused", number=1000)
    lines = [line.split("router ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["refused number=0", "refused for another reason", "refused number=1000 left_out=999"]


def test_a_value_stays_on_its_line_and_is_not_endless(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "router")
    Log("test").warning("refused", reason="a\nb\rc" + "x" * 100_000)
    (line,) = capsys.readouterr().err.splitlines()
    assert "reason=a\\nb\\rcxxx" in line
    assert len(line) < 2000


def test_a_library_is_quietened_too(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "router")
    take_over("kvrelay-test-library")
    library = logging.getLogger("kvrelay-test-library")
    for number in range(1000):
        library.warning("request %d is none", number)
    assert capsys.readouterr().err.count("\n") == 1
    clock[0] += logging_module.SELDOM_S
    library.warning("request %d is none", 7)
    assert "router request 7 is none" in capsys.readouterr().err
