"""What is scraped is what Prometheus expects, and the dashboard and the alerts in deploy/ ask for metrics that exist."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from documented import metric_table
from patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from server import Server, serve

from kvrelay.metrics import Metrics
from kvrelay.router.collector import WorkerCollector

DEPLOY = pathlib.Path(__file__).resolve().parent.parent / "deploy"
BOARD = DEPLOY / "grafana/kvrelay.json"
RULES = DEPLOY / "prometheus/alerts.yml"
UNITS = ("seconds", "bytes")


def exported() -> dict[str, tuple[str, set[str]]]:
    """Name as a query has it -> kind and labels."""
    found: dict[str, tuple[str, set[str]]] = {}
    for name, labels, kind in re.findall(r"^\| `(\w+)(?:\{([^}]*)\})?` \| (\w+) \|", "\n".join(metric_table()), re.MULTILINE):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for suffix in suffixes:
            extra = {"le"} if suffix == "_bucket" else set()
            found[name + suffix] = (kind, set(filter(None, labels.split(", "))) | extra)
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Where it stands, and the query."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("place", "query"), [pytest.param(*each, id=each[0]) for each in queries()])
def test_a_query_names_metrics_that_exist_with_labels_that_they_have(place: str, query: str) -> None:
    known = exported()
    names = set(re.findall(r"\bkvrelay_\w+", query))
    assert names or "up{" in query, place
    assert names <= set(known), f"{place}: {names - set(known)}"
    labels = {label for name in names for label in known[name][1]} | {"instance", "job"}
    asked = {label.strip() for group in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query) for label in group.split(",")}
    asked |= {label for inside in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)\s*[=!]", inside)}
    assert asked <= labels, f"{place}: {asked - labels}"
    for name in names:
        is_counter = known[name][0] in ("counter", "histogram")
        assert is_counter == bool(re.search(rf"(?:rate|increase)\({name}\b", query)), f"{place}: {name}"


def test_queries_do_not_count_workers_once_for_each_router() -> None:
    """Every router tells of every worker: one word of each counts."""
    summed = re.compile(r"\bsum(?: by \((?!instance)[^)]*\))? ?\((?:\w+\()?kvrelay_worker_")
    assert [place for place, query in queries() if summed.search(query)] == []


def test_every_figure_of_a_failure_is_on_the_dashboard_or_in_an_alert() -> None:
    asked = " ".join(query for _, query in queries())
    for name in (
        "request_failures",
        "failovers",
        "rejected",
        "deadlines",
        "aborted",
        "worker_losses",
        "worker_crashes",
        "worker_transfers_failed",
    ):
        assert f"kvrelay_{name}_total" in asked, name


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_names_follow_the_conventions_of_prometheus() -> None:
    metrics = Metrics()
    metrics.registry.register(WorkerCollector(list))
    families = list(text_string_to_metric_families(metrics.render().decode()))
    assert len(families) > 50
    for family in families:
        assert re.fullmatch(r"kvrelay(_[a-z0-9]+)+", family.name), family.name
        assert family.documentation, family.name
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_mib")), family.name
        if family.type == "histogram":
            assert family.name.endswith(UNITS), family.name


def test_metrics_that_mean_the_same_as_vllms_are_called_the_same() -> None:
    same = {
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    }  # fmt: skip
    known = exported()
    assert all(f"kvrelay_{name}_bucket" in known for name in same)
    counted = {"prompt_tokens", "prompt_tokens_cached", "generation_tokens", "worker_num_preemptions"}
    assert {f"kvrelay_{name}_total" for name in counted} <= set(known)


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (Debian's package prometheus)",
)


@needs_prometheus
def test_promtool_accepts_the_rules_the_configuration_and_what_is_scraped() -> None:
    for check in (["rules", str(RULES)], ["config", str(DEPLOY / "prometheus/prometheus.yml")]):
        subprocess.run(["promtool", "check", *check], check=True, capture_output=True)
    metrics = Metrics()
    metrics.registry.register(WorkerCollector(list))
    told = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    assert told.returncode == 0, told.stdout.decode() + told.stderr.decode()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def ask(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        result: list[dict[str, Any]] = json.loads(response.read())["data"]["result"]
        return result


def until_known(port: int, query: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if found := ask(port, query):
                return found
        except OSError:
            pass  # it is starting
        assert time.monotonic() < deadline, f"nothing is known of {query}"
        time.sleep(0.2)


def generate(server: Server) -> None:
    body = json.dumps({"model": "tiny", "prompt": list(range(20, 90)), "max_tokens": 6, "ignore_eos": True}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert json.loads(response.read())["usage"]["completion_tokens"] == 6


@needs_prometheus
def test_a_real_prometheus_scrapes_a_real_cluster_and_evaluates_every_rule(tmp_path: pathlib.Path) -> None:
    from tiny_models import tiny_model

    options = (
        "--prefill",
        "1",
        "--decode",
        "1",
        "--threads",
        "1",
        "--local-prefill-tokens",
        "0",
        "--served-model-name",
        "tiny",
    )
    with serve(str(tiny_model("llama")), *options) as server:
        generate(server)
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        shutil.copy(RULES, tmp_path / "alerts.yml")
        port = free_port()
        prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert len(until_known(port, "kvrelay_worker_up == 1")) == 2
            (handed,) = until_known(port, "kvrelay_hand_over_seconds_count > 0")
            assert handed["metric"]["role"] == "prefill"
            assert until_known(port, 'kvrelay_worker_blocks{kind="total"} > 0')
            for place, query in queries():
                if "label_values" not in query:
                    ask(port, query.replace("$__rate_interval", "1m").replace("$worker", ".*"))  # an error is a 400
                    assert place
            assert not ask(port, 'ALERTS{alertname=~"KvrelayDown|KvrelayNoWorker", alertstate="firing"}')
        finally:
            prometheus.terminate()
            prometheus.wait(PATIENCE_S)
