"""`kvrelay chat` against a small stand-in for a server."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from command import run


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each question with how many messages it came with, in three pieces."""

    bodies: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self._reply(200, "application/json", json.dumps({"data": [{"id": "stand-in"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            self._reply(429, "application/json", json.dumps({"error": {"message": "the queue is full"}}))
            return
        pieces = ["I see ", str(len(body["messages"])), " messages"]
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        events += [{"choices": [], "usage": {}}]
        if body["messages"][-1]["content"] == "break":
            events.append({"error": {"message": "the worker was lost"}})
        self._reply(
            200, "text/event-stream", "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        )

    def _reply(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.bodies = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def chat(url: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("chat", "--url", url, *arguments, said=text)


def test_a_piped_conversation_remembers_until_it_is_reset(url: str) -> None:
    result = chat(url, "one\ntwo\n/reset\nthree\n/quit\nnever\n", "--system", "Be brief.")
    assert result.stdout.splitlines() == ["I see 2 messages", "I see 4 messages", "I see 2 messages"]
    assert result.returncode == 0
    assert Handler.bodies[1]["messages"][2] == {"role": "assistant", "content": "I see 2 messages"}
    assert [body["model"] for body in Handler.bodies] == ["stand-in"] * 3


def test_settings_are_sent_and_have_defaults_that_small_models_can_bear(url: str) -> None:
    chat(url, "one\n", "--model", "mine", "--max-tokens", "5", "--temperature", "0")
    chat(url, "one\n")
    first, second = Handler.bodies
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("mine", 5, 0.0)
    assert second.keys() == {"model", "messages", "stream", "temperature", "top_p"}
    assert (second["temperature"], second["top_p"]) == (0.3, 0.9)


def test_a_refused_question_is_told_and_forgotten(url: str) -> None:
    result = chat(url, "fail\none\n")
    assert result.stderr == "error: the queue is full\n"
    assert result.stdout.splitlines() == ["I see 1 messages"]


def test_an_error_in_the_middle_of_an_answer_is_told(url: str) -> None:
    result = chat(url, "break\n")
    assert "error: the worker was lost" in result.stderr
    assert result.returncode == 2


def test_an_unknown_command_is_told(url: str) -> None:
    assert "there are /reset and /quit" in chat(url, "/help\n").stderr
