"""What an engine has to say since its last step, and what it has counted since its start."""

from __future__ import annotations

from kvrelay.errors import RequestError
from kvrelay.ids import RequestId
from kvrelay.wire.serving import Failure, News, SequenceOutput


class Outbox:
    """Filled in order by what ends or advances a request; emptied into one message per step."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.news: list[News] = []
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0

    def __bool__(self) -> bool:
        return bool(self.outputs or self.news)

    def fail(self, request_id: RequestId, error: RequestError) -> None:
        self.news.append(Failure.of(request_id, error))

    def clear(self) -> None:
        """Its lists were sent, and belong to the message."""
        self.outputs, self.news = [], []
