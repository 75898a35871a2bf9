"""`kvrelay top` shows workers and timelines as a server tells them."""

from __future__ import annotations

import io
import json
import urllib.request

import pytest
from patience import PATIENCE_S
from rich.console import Console
from server import serve
from tiny_models import tiny_model

from kvrelay.cli import main, top
from kvrelay.cli.top import Blocks, Request, Stage, Worker


def shown(thing: object) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_bar_has_the_stages_in_their_order_and_proportion() -> None:
    stages = [Stage("queue", "whole", 0.0, 25.0), Stage("prefill", "whole", 25.0, 25.0), Stage("decode", "whole", 50.0, 50.0)]
    text = top.bar(Request("a", "finished", 5, 3, 50.0, 100.0, stages))
    assert len(text.plain) == 40
    styles = [str(span.style) for span in text.spans]
    assert [styles.count(top._COLORS[stage.stage]) for stage in stages] == [10, 10, 20]
    assert set(top.bar(Request("a", "running", 5, 0, None, 100.0, [])).plain) == {"·"}


def test_tables_name_what_is_wrong() -> None:
    worker = Worker("decode-1", "decode", "gone", 1, 2, 3, 4, Blocks(total=10, free=5, cached=2), problem="connecting")
    assert shown(top.worker_table([worker])).splitlines()[1].split() == ["decode-1", "connecting", "1", "2", "3", "4", "3/10"]
    request = Request("mine", "failed", 5, 3, None, 100.0, [], failovers=[{"reason": "lost"}])
    assert "failed, sent again 1x" in shown(top.request_table([request]))


def test_a_real_server_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(str(tiny_model("llama")), "--whole", "1", "--threads", "1", "--served-model-name", "tiny") as server:
        body = json.dumps(
            {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "request_id": "seen"}
        ).encode()
        request = urllib.request.Request(server.url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            assert response.status == 200
        assert main.main(["top", "--once", "--url", server.url]) == 0
        (timeline,) = server.get("/requests/seen")["data"]
    printed = capsys.readouterr().out
    assert "seen" in printed
    assert "whole-" in printed
    assert [one["stage"] for one in timeline["stages"]] == ["route", "queue", "prefill", "decode"]
    assert timeline["output_tokens"] == 4
