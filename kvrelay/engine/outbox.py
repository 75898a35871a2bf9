"""What an engine has to say since its last step, and what it has counted since its start."""

from __future__ import annotations

from kvrelay.errors import RequestError
from kvrelay.ids import RequestId
from kvrelay.wire.serving import BeamResult, Failure, SequenceOutput


class Outbox:
    """Filled by whoever ends or advances a request; emptied into one message per step."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.beams: list[BeamResult] = []
        self.failures: list[Failure] = []
        self.handed_over: list[RequestId] = []
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0

    def __bool__(self) -> bool:
        return bool(self.outputs or self.failures or self.handed_over)

    def fail(self, request_id: RequestId, error: RequestError) -> None:
        self.failures.append(Failure(request_id, error.kind, error.message, error.param))

    def clear(self) -> None:
        """Its lists were sent: they are nobody's to change any more."""
        self.outputs, self.beams, self.failures, self.handed_over = [], [], [], []
