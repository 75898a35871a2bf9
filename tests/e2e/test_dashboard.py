"""The dashboard in a real browser, on a real cluster: chat, a killed worker, a continuation, keyboard alone, accessibility."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
from axe_core_python.selenium import Axe
from browser import Browser, browsing, needs_chromium
from patience import PATIENCE_S
from process_cluster import ProcessCluster
from selenium.webdriver.common.keys import Keys
from server import is_idle
from tiny_models import tiny_model

from kvrelay.config import RouterOptions
from tests.frontend.serving import fake_backend, make_app, running_server

pytestmark = needs_chromium
POSITIONS = 4096
ADMIN_KEY = "an-operators"
LONG = 1500  # tokens of a stream that is to be interrupted
WORKER_FLAGS = ("--kv-blocks", "1024", "--max-model-len", str(POSITIONS), "--threads", "1", "--progress", "plain")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsing()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """1 prefill and 2 decode workers of a tiny model that can say much."""
    folder = tmp_path_factory.mktemp("dashboard")
    model = shutil.copytree(tiny_model("llama"), folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    (folder / "admin-keys").write_text(ADMIN_KEY)
    (folder / "admin-keys").chmod(0o600)
    flags = ("--local-prefill-tokens", "16", "--served-model-name", "tiny", "--admin-key-file", str(folder / "admin-keys"))
    with ProcessCluster(str(model), folder, registration_s=4.0, router_flags=flags, worker_flags=WORKER_FLAGS) as cluster:
        for role in ("prefill", "decode", "decode"):
            cluster.add(role)
        cluster.until_ready(3)
        yield cluster
        cluster.until(lambda: all(is_idle(entry) for entry in cluster.shown() if entry["state"] == "ready"))


def set_value(browser: Browser, field: str, value: str) -> None:
    browser.js("document.getElementById(arguments[0]).value = arguments[1]", field, value)


def open_dashboard(browser: Browser, cluster: ProcessCluster, *, width: int = 1440) -> None:
    browser.open(cluster.url, width=width)
    browser.until(lambda: browser.count("#workers .card.ready") >= 2, "workers are shown")


def say(browser: Browser, text: str, *, tokens: int) -> None:
    set_value(browser, "set-max", str(tokens))
    set_value(browser, "set-temperature", "0")
    set_value(browser, "set-other", '{"ignore_eos": true}')
    browser.one("#chat-text").send_keys(text + Keys.ENTER)


def violations(browser: Browser) -> list[str]:
    axe = Axe()
    found = axe.run(browser.driver)["violations"]
    return [f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes']][:3]}" for one in found]


def unmeasured(browser: Browser) -> list[str]:
    """Charts that have a line without values."""
    labels: list[str] = browser.js("return [...document.querySelectorAll('#charts svg')].map((one) => one.ariaLabel)")
    return [label for label in labels if "not measured" in label]


def test_a_chat_streams_and_says_who_did_what(browser: Browser, cluster: ProcessCluster) -> None:
    open_dashboard(browser, cluster)
    say(browser, "Tell me of the quick brown fox that jumps over the lazy dog, and of the capital of France.", tokens=400)
    browser.until(lambda: browser.text(".turn.model .text"), "the answer begins")
    browser.until(lambda: "answer tokens" in browser.text(".turn.model .counts"), "the answer ends")
    assert "prompt + " in browser.text(".turn.model .counts")
    work = browser.until(lambda: "decode-" in (text := browser.text(".turn.model .work ul")) and text, "the stages are shown")
    for word in ("prefill-", "prefill", "transfer", "decode", "ms"):
        assert word in work
    browser.until(lambda: "(±" in browser.text("#requests li:first-child .facts"), "how the workers' clocks differ is shown")
    browser.until(lambda: browser.count("#charts svg") == 5 and not unmeasured(browser), "all charts have values")
    browser.until(lambda: "B moved" in browser.text(".flow") or "B/s" in browser.text(".flow"), "KV flows on the map")
    assert browser.problems() == []


def test_stop_ends_an_answer(browser: Browser, cluster: ProcessCluster) -> None:
    open_dashboard(browser, cluster)
    say(browser, "The quick brown fox jumps over the lazy dog.", tokens=LONG)
    browser.until(lambda: browser.text(".turn.model .text"), "it begins")
    browser.one("#chat-stop").click()
    browser.until(lambda: "stopped" in browser.text(".turn.model .counts"), "it says so")
    browser.until(lambda: browser.text("#requests li:first-child .state") == "aborted", "and so does the list")
    assert cluster.get("/requests?limit=1")["data"][0]["output_tokens"] < LONG
    cluster.until(lambda: all(is_idle(entry) for entry in cluster.shown()))


def test_an_answer_that_was_cut_is_continued_and_shows_its_parent(browser: Browser, cluster: ProcessCluster) -> None:
    open_dashboard(browser, cluster)
    say(browser, "What is the capital of France?", tokens=20)
    browser.until(lambda: "longest answer reached" in browser.text(".turn.model .counts"), "the answer is cut")
    parent = cluster.get("/requests?limit=1")["data"][0]["id"]
    before = browser.text(".turn.model .text")
    browser.one(".turn.model button").click()
    browser.until(lambda: len(browser.text(".turn.model .text")) > len(before), "the answer goes on")
    browser.until(lambda: "continues" in browser.text("#requests li:first-child .family"), "the child is listed")
    browser.until(lambda: browser.text("#requests li:first-child .state") == "finished", "the child has ended")
    browser.one("#requests li:first-child summary").click()
    shown = browser.until(lambda: browser.text("#requests li:first-child .parent"), "the parent is named")
    assert parent
    assert parent in shown
    browser.one("#requests li:first-child .parent button").click()
    browser.until(lambda: browser.js("return document.activeElement.tagName") == "SUMMARY", "the parent has the focus")
    assert "Continued by" in browser.text("#requests li:nth-child(2) .children")


def test_a_killed_worker_turns_red_and_its_stream_goes_on(browser: Browser, cluster: ProcessCluster) -> None:
    open_dashboard(browser, cluster)
    say(browser, "The quick brown fox jumps over the lazy dog.", tokens=LONG)
    browser.until(lambda: browser.text(".turn.model .text"), "the answer begins")
    busy = [entry for entry in cluster.shown() if entry["role"] == "decode" and entry["in_flight"]]
    assert busy, "the stream ended before it could be interrupted"
    victim = next(worker for worker in cluster.workers if worker.pid == busy[0]["pid"])
    victim.kill()
    red = f'#workers .card.gone[data-worker="{busy[0]["id"]}"]'
    browser.until(lambda: browser.count(red), "its card is red")
    assert browser.count(f'.node.gone[data-worker="{busy[0]["id"]}"]') == 1
    successor = cluster.add("decode")
    browser.until(lambda: f"+ {LONG} answer tokens" in browser.text(".turn.model .counts"), "the stream goes on to its end")
    assert browser.count(".turn.model > .problem") == 0
    browser.until(lambda: "sent again" in browser.text("#requests li:first-child .family"), "the failover is told")
    cluster.until(lambda: successor.pid in {entry["pid"] for entry in cluster.shown() if entry["state"] == "ready"})


def test_everything_can_be_done_with_the_keyboard(browser: Browser, cluster: ProcessCluster) -> None:
    open_dashboard(browser, cluster)
    browser.press(Keys.TAB)
    assert "skip" in str(browser.js("return document.activeElement.className"))
    browser.tab_to("#theme")
    browser.press(Keys.ENTER)
    assert browser.js("return document.documentElement.dataset.theme") == "light"
    browser.tab_to("#workers .card.ready .actions summary")
    browser.press(Keys.ENTER)
    browser.tab_to("#workers .card.ready .actions button")
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.js("return document.getElementById('ask').open"), "a question is asked")
    browser.press(Keys.ESCAPE)
    browser.until(lambda: not browser.js("return document.getElementById('ask').open"), "the question is taken back")
    browser.tab_to(".settings summary")
    browser.press(Keys.ENTER)
    browser.tab_to("#set-max")
    browser.press(Keys.BACKSPACE, "5")  # what it held is selected
    assert browser.js("return document.getElementById('set-max').value") == "5"
    browser.tab_to("#chat-text")
    browser.press("Hello", Keys.ENTER)
    browser.until(lambda: "answer tokens" in browser.text(".turn.model .counts"), "the answer ends")
    asked = cluster.get("/requests?limit=1")["data"][0]["id"]
    browser.until(lambda: browser.text("#requests li:first-child .id") == asked, "the request is the first of the list")
    browser.tab_to("#requests summary")
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.count("#requests li:first-child details[open]"), "a request is opened")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing(browser: Browser, cluster: ProcessCluster, theme: str, width: int) -> None:
    open_dashboard(browser, cluster, width=width)
    browser.js("document.documentElement.dataset.theme = arguments[0]", theme)
    say(browser, "The quick brown fox jumps over the lazy dog. What is the capital of France?", tokens=30)
    browser.until(lambda: "answer tokens" in browser.text(".turn.model .counts"), "the answer ends")
    browser.until(lambda: browser.count(".turn.model .work ul"), "the stages are shown")
    browser.js("for (const each of document.querySelectorAll('details')) each.open = true")
    assert violations(browser) == []
    assert not browser.is_too_wide
    browser.driver.get(f"{cluster.url}/docs")
    browser.js("document.documentElement.dataset.theme = arguments[0]", theme)
    browser.until(lambda: browser.count("#paths details") > 10, "the API is shown")
    browser.js("for (const each of [...document.querySelectorAll('details')].slice(0, 3)) each.open = true")
    browser.until(lambda: browser.count("#paths textarea") >= 3, "endpoints are opened")
    assert violations(browser) == []
    assert not browser.is_too_wide


def test_a_worker_drains_when_an_operator_tells_it_to(browser: Browser, cluster: ProcessCluster) -> None:
    extra = cluster.add("decode")
    cluster.until(lambda: extra.pid in {entry["pid"] for entry in cluster.shown() if entry["state"] == "ready"})
    name = next(entry["id"] for entry in cluster.shown() if entry["pid"] == extra.pid)
    open_dashboard(browser, cluster)
    card = f'#workers .card[data-worker="{name}"]'
    browser.until(lambda: browser.count(f"{card}.ready"), "it is ready")
    browser.one(f"{card} .actions summary").click()
    browser.one(f"{card} .actions button").click()
    browser.until(lambda: browser.js("return document.getElementById('ask').open"), "a question is asked")
    browser.one("#ask-yes").click()
    browser.until(lambda: browser.one("#ask-key").is_displayed(), "an admin key is asked for")
    assert violations(browser) == []
    browser.one("#ask-key").send_keys("wrong" + Keys.ENTER)
    browser.until(lambda: "wrong admin key" in browser.text("#ask-text"), "a wrong one is refused")
    browser.one("#ask-key").send_keys(ADMIN_KEY + Keys.ENTER)
    browser.until(lambda: browser.count(f"{card}.draining, {card}.left"), "it drains")
    extra.process.wait(PATIENCE_S)
    browser.until(lambda: browser.count(f"{card}.left"), "it has left, and is not red")


def test_with_keys_nothing_is_shown_without_one(browser: Browser) -> None:
    app = make_app(fake_backend("An answer."), RouterOptions(api_key="secret"))
    with running_server(app) as url:
        browser.open(url)
        browser.until(lambda: browser.count("#gate-key"), "a key is asked for")
        assert not browser.one("#content").is_displayed()
        assert violations(browser) == []
        browser.one("#gate-key").send_keys("wrong" + Keys.ENTER)
        browser.until(lambda: "does not know" in browser.text("#gate-problem"), "a wrong key is refused")
        browser.one("#gate-key").send_keys("secret" + Keys.ENTER)
        browser.until(lambda: browser.one("#content").is_displayed(), "the right key opens it")
        say(browser, "Hello", tokens=20)
        browser.until(lambda: "An answer." in browser.text(".turn.model .text"), "it answers")
        browser.driver.get(f"{url}/docs")
        browser.until(lambda: browser.count("#paths details") > 10, "the API page knows the key")
        browser.driver.get("about:blank")
        browser.until(lambda: app.feed.num_viewers == 0, "the feed has ended")
    assert not app.feed.is_running


# Two ticks of a feed, and one of another router: 2 s in which 10 first tokens and 40 of 160 prompt tokens were computed.
CHARTED = """
const done = arguments[0], none = { by_peer: {} };
const worker = (count) => ({ id: "w", role: "whole", state: "ready", waiting: 1, running: 2, transfers: none, images: none,
  output_tokens: 3 * count, prompt_tokens: count, cached_tokens: 3 * count });
const tick = (router, at, count) => ({ at, counters: { workers_left: 0 }, cluster: { router, workers: [worker(8 * count)] },
  histograms: { ttft: [["0.1", count], ["0.2", 2 * count], ["+Inf", 2 * count]], inter_token: [["+Inf", 0]], queue: [] } });
import("/assets/history.js").then(({ History }) => {
  const history = new History();
  for (const one of [tick("a", 1e10, 0), tick("a", 1e10 + 2, 5), tick("b", 1e10 + 4, 9)]) history.take(one);
  done(history.points);
}, (error) => done(String(error)));
"""


def test_the_charts_make_rates_and_quantiles_of_what_the_feed_counts(browser: Browser, cluster: ProcessCluster) -> None:
    open_dashboard(browser, cluster)
    (point,) = browser.driver.execute_async_script(CHARTED)
    assert point == {
        "at": 1e10 + 2, "ttft50": pytest.approx(0.1), "ttft95": pytest.approx(0.19), "token50": None, "token95": None,
        "waiting": 1, "running": 2, "output": 60, "prompt": 20, "hits": 75,
    }  # fmt: skip


def test_an_answer_of_another_router_shows_its_stages_too(browser: Browser, cluster: ProcessCluster) -> None:
    """As behind one port, where the feed and the chat may be with different ones."""
    with cluster.another_router("--served-model-name", "tiny", "--allowed-origins", "*") as url:
        browser.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
        open_dashboard(browser, cluster)
        browser.js(
            "const own = fetch; fetch = (path, rest) => own(path.startsWith('v1/') ? `${arguments[0]}/${path}` : path, rest)",
            url,
        )
        say(browser, "The quick brown fox jumps over the lazy dog.", tokens=10)
        browser.until(lambda: "decode-" in browser.text(".turn.model .work ul"), "the stages are shown")
        (shown,) = [
            one for one in cluster.get("/requests?limit=50")["data"] if one["router"] != cluster.get("/cluster")["router"]
        ]
        assert shown["id"] in browser.text("#requests li:first-child .id")
        browser.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
