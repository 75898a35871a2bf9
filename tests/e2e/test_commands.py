"""The commands of README and docs, page by page, as a reader runs them: every server answers, every other command succeeds.

Hosts become addresses of loopback, models tiny ones, and what a page tells to ask port 8000 is asked of a server of SmolLM2.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from commands import PAGES, ROOT, Block, blocks_of
from etcd_server import etcd_server, free_port
from patience import PATIENCE_S, until
from server import Server, serve
from tiny_models import tiny_model
from vision_models import tiny_vl

KEY = "secret"
MODELS = {"smollm2": "llama", "MODEL": "llama", "path/to/model": "llama", "path/to/qwen3-vl": "qwen3_vl", "FOLDER": "qwen3_vl"}
FILES = ("cluster.key", "keys", "admin-keys")
SMALL = ("--kv-blocks", "64", "--threads", "1")
AT_ONCE = {"quickstart.md"}  # asks a server that others ask too; the other pages wait for the long counts
_HOST = re.compile(r"(?:10|127)\.0\.0\.(\d+)")


def to_run() -> list[object]:
    pages = [page for page in PAGES if any(block.is_run_here for block in blocks_of(page))]
    long = pytest.mark.long
    return [pytest.param(page, id=page.name, marks=[] if page.name in AT_ONCE else [long]) for page in pages]


class Reader:
    """Works through one page. Routers and workers of a block are one cluster."""

    def __init__(self, folder: pathlib.Path, url: str, etcd: str) -> None:
        self._folder, self._url, self._etcd = folder, url, etcd
        self._net = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}"
        for name, key in (("keys", KEY), ("admin-keys", f"admin-{KEY}")):
            (folder / name).write_text(key + "\n")
            (folder / name).chmod(0o600)

    def run(self, block: Block) -> None:
        with contextlib.ExitStack() as running:
            routers: list[Server] = []
            num_workers, port = 0, str(free_port())
            for words in block.commands:
                match words:
                    case ["curl", *rest]:
                        self._finish("curl", "-sS", "--fail-with-body", *map(self._for_client, rest))
                    case ["make", "serve", *arguments]:
                        self._serve(shlex.split(" ".join(arguments).removeprefix("ARGS=")))
                    case ["kvrelay", "serve", *arguments]:
                        self._serve(arguments)
                    case ["kvrelay", "router", *arguments]:
                        routers.append(running.enter_context(self._started("router", *arguments, "--port", port)))
                        routers[-1].wait_ready()
                        port = str(free_port()) if "--reuse-port" not in arguments else port
                    case ["kvrelay", "worker", *arguments]:
                        running.enter_context(self._started("worker", *arguments, *SMALL))
                        num_workers += 1
                    case ["kvrelay", "chat", *arguments]:
                        self._finish("kvrelay", "chat", *arguments, "--url", self._url, said="Hello\n")
                    case ["kvrelay", *arguments]:
                        self._finish("kvrelay", *map(self._here, arguments))
                    case _:
                        raise AssertionError(f"neither run nor marked: {words}")
            for router in routers:
                until(lambda router=router: num_ready(router) == num_workers)  # type: ignore[misc]
                if num_workers:
                    ask(router)

    def _finish(self, *words: str, said: str = "") -> None:
        command = [sys.executable, "-m", *words] if words[0] == "kvrelay" else list(words)
        ended = subprocess.run(
            command, cwd=self._folder, input=said, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)

    def _serve(self, arguments: list[str]) -> None:
        if "--port" in arguments:
            at = arguments.index("--port")
            arguments = arguments[:at] + arguments[at + 2 :]
        with_model = arguments if arguments and not arguments[0].startswith("--") else ["smollm2", *arguments]
        with serve(*map(self._here, with_model), *SMALL, fresh=True) as server:
            if any(option.startswith("--api-key") for option in arguments):
                server.headers = {"authorization": f"Bearer {KEY}"}
            ask(server)

    @contextlib.contextmanager
    def _started(self, *words: str) -> Iterator[Server]:
        if "cluster.key" in words and not (self._folder / "cluster.key").exists():
            self._finish("kvrelay", "keygen", "cluster.key")
        command = [sys.executable, "-m", "kvrelay", *map(self._here, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        server = Server(process)
        if "--api-key-file" in words:
            server.headers = {"authorization": f"Bearer {KEY}"}
        try:
            yield server
        finally:
            server.stop()

    def _here(self, word: str) -> str:
        if word in MODELS:
            return str(tiny_vl("qwen3_vl") if MODELS[word] == "qwen3_vl" else tiny_model(MODELS[word]))
        if word in FILES:
            return str(self._folder / word)
        return self._etcd if word.startswith("etcd://") else _HOST.sub(rf"{self._net}.\1", word)

    def _for_client(self, word: str) -> str:
        return re.sub(r"^(http://)?(127\.0\.0\.1|localhost):8000", self._url, word)


def ask(server: Server) -> None:
    body = json.dumps({"prompt": "The quick brown fox", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"content-type": "application/json", **server.headers}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert json.loads(response.read())["usage"]["completion_tokens"] == 4


def num_ready(router: Server) -> int:
    return sum(worker["state"] == "ready" for worker in router.get("/cluster")["workers"])


@pytest.mark.parametrize("page", to_run())
def test_the_commands_of_a_page_work(page: pathlib.Path, tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> None:
    blocks = [block for block in blocks_of(page) if block.is_run_here]
    words = {word for block in blocks for command in block.commands for word in command}
    url = request.getfixturevalue("smol").url if words & {"curl", "chat"} else ""
    with contextlib.ExitStack() as running:
        uses_etcd = any(word.startswith("etcd://") for word in words)
        reader = Reader(tmp_path, url, running.enter_context(etcd_server()).address if uses_etcd else "")
        for block in blocks:
            reader.run(block)


def test_the_python_of_the_readme_prints_answers(smol: Server) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        code = code.replace("http://127.0.0.1:8000", smol.url)
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert ended.returncode == 0, ended.stderr
        assert "Paris" in ended.stdout
