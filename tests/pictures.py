"""Takes the pictures of docs/dashboard.md: `python tests/pictures.py`, with Chromium. Look at them before you commit them.

SmolLM2 on two prefill and two decode workers; a few conversations run meanwhile, so that something is to be seen.
"""

from __future__ import annotations

import concurrent.futures
import io
import json
import pathlib
import random
import sys
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from browser import Browser
from PIL import Image
from selenium.webdriver.common.keys import Keys
from server import Server, serve

IMAGES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "images"
WIDE, PHONE = (1440, 1277), (390, 844)
QUESTION = (
    "Explain in two sentences what a key-value cache is, and why a server would move it between machines instead of "
    "computing it again. Use an example from everyday life, such as a library, a kitchen, or a relay race in the rain."
)
TALKERS = 4
WORDS = ("the", "runner", "takes", "a", "key", "and", "value", "through", "rain")
SERVED = "smollm2 --prefill 2 --decode 2 --max-model-len 2048 --kv-blocks 512 --threads 1"


def ask(server: Server, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, object] = json.loads(response.read())
        return answer


def talk(server: Server, number: int, until: float) -> None:
    """One story after the other, and a continuation of each."""
    rng, turn = random.Random(number), 0
    while time.monotonic() < until:
        turn += 1
        words = " ".join(rng.choices(WORDS, k=160))
        name = f"story-{number}-{turn}"
        ask(server, {"prompt": f"{turn} {words}", "max_tokens": rng.randint(20, 60), "keep_kv": 60, "request_id": name})
        if turn % 2:
            more = {"continuation_suffix": " And then", "max_tokens": 16, "request_id": f"{name}-more"}
            ask(server, {"continuation_of": name, **more})
        time.sleep(rng.random())


def save(browser: Browser, name: str) -> None:
    picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"dashboard-{name}.png", optimize=True)
    print(f"dashboard-{name}.png: {picture.width} x {picture.height}")


def show(browser: Browser, theme: str, selector: str = "body") -> None:
    browser.js("document.documentElement.dataset.theme = arguments[0]", theme)
    browser.js("document.querySelector(arguments[0]).scrollIntoView()", selector)
    time.sleep(2)


def take(server: Server, browser: Browser, until: float) -> None:
    browser.open(server.url)
    browser.size(*WIDE)
    browser.until(lambda: browser.count("#workers .card.ready") == 4, "workers are shown")
    browser.js("document.getElementById('set-max').value = 80; document.getElementById('set-temperature').value = 0")
    time.sleep(max(0.0, until - time.monotonic() - 40))
    browser.one("#chat-text").send_keys(QUESTION + Keys.ENTER)
    browser.until(lambda: "answer tokens" in browser.text(".turn.model .counts"), "the answer ends")
    browser.until(lambda: browser.count(".turn.model .work ul"), "its stages are shown")
    for theme in ("light", "dark"):
        show(browser, theme)
        save(browser, theme)
    row = "#requests li:has(.stage-transfer):has(.state.finished)"
    browser.js("document.querySelector(arguments[0]).open = true", f"{row} details")
    show(browser, "dark", "#requests")
    browser.js("scrollBy(0, -110)")
    time.sleep(1)
    save(browser, "requests")
    browser.size(*PHONE)
    show(browser, "dark")
    save(browser, "phone-dark")
    show(browser, "light", "#chat")
    save(browser, "phone-light")


def main() -> int:
    browser = Browser()
    try:
        with serve(*SERVED.split()) as server, concurrent.futures.ThreadPoolExecutor(TALKERS) as pool:
            until = time.monotonic() + 120
            talks = [pool.submit(talk, server, number, until) for number in range(TALKERS)]
            take(server, browser, until)
            for one in talks:
                one.result()
    finally:
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
