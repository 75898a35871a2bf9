"""The dashboard of a cluster that takes images and asks for a key: an image in the chat, an encode worker, a change of role."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import tokenizers
from browser import Browser, browsing, needs_chromium
from process_cluster import ProcessCluster
from selenium.webdriver.common.keys import Keys
from server import is_idle
from vision_models import make_prompt, reference_output, tiny_vl

from tests.e2e.test_dashboard import say, violations

pytestmark = needs_chromium
KEY = "secret"
QUESTION = "What is it?"
TOKENS = 6
WORKER_FLAGS = ("--kv-blocks", "300", "--threads", "1", "--progress", "plain")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsing()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """An encode, a prefill and a decode worker of a tiny model that takes images."""
    folder = tmp_path_factory.mktemp("dashboard_images")
    flags = ("--local-prefill-tokens", "0", "--served-model-name", "tiny", "--api-key", KEY)
    model = str(tiny_vl("qwen3_vl"))
    with ProcessCluster(
        model, folder, registration_s=2.0, router_flags=flags, worker_flags=WORKER_FLAGS, api_key=KEY
    ) as cluster:
        for role in ("encode", "prefill", "decode"):
            cluster.add(role)
        cluster.until_ready(3)
        yield cluster
        cluster.until(lambda: all(is_idle(entry) for entry in cluster.shown() if entry["state"] == "ready"))


def open_with_key(browser: Browser, cluster: ProcessCluster) -> None:
    browser.open(cluster.url)
    browser.until(lambda: browser.count("#gate-key"), "a key is asked for")
    browser.one("#gate-key").send_keys(KEY + Keys.ENTER)
    browser.until(lambda: browser.count("#workers .card.ready") >= 3, "workers are shown")


def test_an_image_in_the_chat_is_answered_and_its_encode_worker_is_on_the_map(
    browser: Browser, cluster: ProcessCluster, tmp_path: pathlib.Path
) -> None:
    prompt = make_prompt("qwen3_vl", [(70, 50)], QUESTION)
    picture = tmp_path / "picture.png"
    picture.write_bytes(prompt.images[0].data)
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_vl("qwen3_vl") / "tokenizer.json"))
    expected = tokenizer.decode(reference_output("qwen3_vl", prompt, TOKENS)[0])

    open_with_key(browser, cluster)
    assert browser.count('.node.ready[data-worker^="encode-"]') == 1
    assert "Encode" in browser.text(".column-title")
    browser.one("#chat-file").send_keys(str(picture))
    browser.until(lambda: browser.count("#chat-images img"), "the image is shown before it is sent")
    say(browser, QUESTION, tokens=TOKENS)
    browser.until(lambda: f"{len(prompt.tokens)} prompt + {TOKENS} answer" in browser.text(".turn.model .counts"), "it answers")
    assert browser.text(".turn.model .text") == expected
    assert browser.count('.turn.user img[alt="picture.png"]') == 1
    assert browser.count("#chat-images img") == 0
    for word in ("encode-", "prefill-", "decode-", "transfer", "ms"):
        browser.until(lambda word=word: word in browser.text(".turn.model .work ul"), f"the stages show {word}")
    encoder = '#workers .card.ready[data-worker^="encode-"]'
    browser.until(lambda: "Encoded1" in browser.text(f"{encoder} .facts"), "its card counts the image")
    browser.until(lambda: browser.count(".flow") >= 2, "embeddings and KV flow on the map")
    assert violations(browser) == []
    assert [problem for problem in browser.problems() if "401" not in problem] == []  # before the key was given


def test_a_worker_changes_its_role_when_it_is_told_to(browser: Browser, cluster: ProcessCluster) -> None:
    extra = cluster.add("decode")
    cluster.until(lambda: extra.pid in {entry["pid"] for entry in cluster.shown() if entry["state"] == "ready"})
    name = next(entry["id"] for entry in cluster.shown() if entry["pid"] == extra.pid)
    open_with_key(browser, cluster)
    card = f'#workers .card[data-worker="{name}"]'
    browser.until(lambda: browser.count(f"{card}.ready"), "it is ready")
    browser.one(f"{card} .actions summary").click()
    assert browser.text(f"{card} .actions option").split() == ["prefill", "whole", "encode"]
    browser.js("document.querySelector(arguments[0]).value = 'prefill'", f"{card} .actions select")
    browser.one(f"{card} .actions .pair button").click()
    browser.until(lambda: browser.js("return document.getElementById('ask').open"), "a question is asked")
    assert f"Change {name} to prefill?" in browser.text("#ask")
    browser.one("#ask-yes").click()
    browser.until(lambda: browser.count(f"{card}.draining, {card}.left"), "it drains")
    browser.until(lambda: browser.count('#workers .card.ready[data-worker^="prefill-"]') == 2, "it is back in its new role")
    assert {entry["role"] for entry in cluster.shown() if entry["pid"] == extra.pid and entry["state"] == "ready"} == {
        "prefill"
    }
