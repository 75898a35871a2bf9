"""`kvrelay top` shows workers and timelines as a server tells them."""

from __future__ import annotations

import io
import json
import urllib.request
from typing import Any

import pytest
from patience import PATIENCE_S
from rich.console import Console
from server import serve
from tiny_models import tiny_model

from kvrelay.cli import main, top
from kvrelay.cli.top import Blocks, Worker
from kvrelay.wire.timelines import ClockShown, FailoverShown, StageShown, TimelineShown


def shown(thing: object) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def timeline(*stages: tuple[str, float, float], failovers: tuple[FailoverShown, ...] = (), **changes: Any) -> TimelineShown:
    made = [
        StageShown(stage=stage, worker="whole-1", role="whole", attempt=0, start_ms=start_ms, ms=ms)
        for stage, start_ms, ms in stages
    ]
    known: dict[str, Any] = dict.fromkeys(("router", "answer_id", "trace_id", "transfer_id", "parent"), "")
    known |= {"number": 1, "id": "mine", "state": "finished", "arrived_at": 0.0, "children": [], "workers": [], "clocks": {}}
    known |= {"prompt_tokens": 5, "output_tokens": 3, "first_token_ms": None, "total_ms": 100.0}
    return TimelineShown(stages=made, failovers=list(failovers), **known | changes)


def test_a_bar_has_the_stages_in_their_order_and_proportion() -> None:
    line = timeline(("queue", 0.0, 25.0), ("prefill", 25.0, 25.0), ("decode", 50.0, 50.0))
    text = top.bar(line)
    assert len(text.plain) == 40
    styles = [str(span.style) for span in text.spans]
    assert [styles.count(top._COLORS[stage.stage]) for stage in line.stages] == [10, 10, 20]
    assert set(top.bar(timeline()).plain) == {"·"}


def test_tables_name_what_is_wrong() -> None:
    worker = Worker("decode-1", "decode", "gone", 1, 2, 3, 4, Blocks(total=10, free=5, cached=2), problem="connecting")
    assert shown(top.worker_table([worker])).splitlines()[1].split() == ["decode-1", "connecting", "1", "2", "3", "4", "3/10"]
    request = timeline(("decode", 2.0, 9.5), failovers=(FailoverShown(at_ms=40.0, reason="lost"),), state="failed")
    assert "failed, sent again 1x" in shown(top.request_table([request]))


def test_one_request_is_shown_with_its_stages_workers_failovers_relatives_and_clocks() -> None:
    again = FailoverShown(at_ms=40.0, reason="its worker was lost")
    relatives = {"parent": "mum", "children": ["tom", "ann"], "clocks": {"whole-1": ClockShown(offset_ms=-1.25, error_ms=0.5)}}
    line = timeline(("decode", 50.0, 9.5), ("queue", 0.0, 25.0), failovers=(again,), **relatives)
    _, queue, sent_again, decode, *rest = shown(top.details(line)).splitlines()
    assert queue.split() == ["0.0", "ms", "25.0", "ms", "queue", "0", "whole-1"]
    assert sent_again.split(maxsplit=2)[2].startswith("sent again")
    assert sent_again.endswith("its worker was lost")
    assert decode.split() == ["50.0", "ms", "9.5", "ms", "decode", "0", "whole-1"]
    assert rest == ["continues from mum", "continued by tom, ann", "clock of whole-1 -1.2 ms (± 0.5)"]


def test_a_real_server_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(str(tiny_model("llama")), "--whole", "1", "--threads", "1", "--served-model-name", "tiny") as server:
        body = json.dumps(
            {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "request_id": "seen"}
        ).encode()
        request = urllib.request.Request(server.url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            assert response.status == 200
        assert main.main(["top", "--once", "--url", server.url]) == 0
        assert main.main(["top", "seen", "--once", "--url", server.url]) == 0
        (line,) = server.get("/requests/seen")["data"]
    printed = capsys.readouterr().out
    assert printed.count("seen") == 2
    assert "began after" in printed
    assert "whole-" in printed
    assert [one["stage"] for one in line["stages"]] == ["route", "queue", "prefill", "decode"]
    assert line["output_tokens"] == 4
