"""`kvrelay chat`: a conversation in the terminal with any OpenAI-compatible server.

Reads lines from the terminal or from a pipe; `/reset` begins anew, `/quit` or end of file ends. Ctrl-C stops the answer that
is being written, not the conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec

from kvrelay.cli.client import add_api_key, add_url, ask, connect, error_text
from kvrelay.errors import ConfigError, KVRelayError, UnavailableError
from kvrelay.options import Parser

_EPILOG = """\
commands inside the chat:
  /reset    forget the conversation
  /quit     end (so does Ctrl-D)

examples:
  kvrelay chat
  kvrelay chat --url http://10.0.0.1:8000 --system "Answer in one sentence."
  echo "What is the capital of France?" | kvrelay chat --temperature 0
"""


def run(argv: list[str]) -> int:
    arguments = build_parser().parse_strictly(argv)
    with connect(arguments.url, arguments.api_key, read_timeout_s=None) as client:
        model = arguments.model or _first_model(client)
        settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        chat = Chat(client, model, arguments.system, {k: v for k, v in settings.items() if v is not None})
        return _converse(chat, interactive=sys.stdin.isatty())


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay chat", description="Talks to a running server in the terminal.", epilog=_EPILOG)
    add_url(parser)
    parser.add_argument("--model", default="", metavar="NAME", help="model to ask; default is the server's first")
    add_api_key(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions that begin every conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is always the same answer; default is the server's")
    return parser


class Chat:
    """One conversation: what was said, and how to go on."""

    def __init__(self, client: httpx.Client, model: str, system: str, settings: dict[str, Any]) -> None:
        self.model = model
        self._client = client
        self._system = system
        self._settings = settings
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> Generator[str, None, None]:
        """The answer, piece by piece. A question that failed is not remembered; an answer cut short is, as far as it went."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self._settings}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise UnavailableError(error_text(response.status_code, response.read()))
                for line in response.iter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield _piece(line[5:].strip())
        except httpx.HTTPError as error:
            raise UnavailableError(f"the server did not answer: {error}") from error


def _converse(chat: Chat, *, interactive: bool) -> int:
    if interactive:
        print(f"Chatting with {chat.model}. /reset begins anew, /quit ends.")
    status = 0
    while True:
        text = _read_line(interactive)
        if text is None or text == "/quit":
            return status
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}: there are /reset and /quit", file=sys.stderr)
        elif text:
            status = _answer(chat, text)


def _read_line(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        if interactive:
            print()
        return None


def _answer(chat: Chat, text: str) -> int:
    answer = chat.say(text)
    try:
        for piece in answer:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        answer.close()
    except KVRelayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(flush=True)
    return 0


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


def _first_model(client: httpx.Client) -> str:
    models = ask(client, "GET", "/v1/models", _Models, server="OpenAI-compatible").data
    if not models:
        raise ConfigError(f"{client.base_url} serves no model")
    return models[0].id


def _piece(data: str) -> str:
    """The text in one event of the stream."""
    event = msgspec.json.decode(data)
    if "error" in event:
        raise UnavailableError(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or []
    return str((choices[0].get("delta") or {}).get("content") or "") if choices else ""
