"""The router's link to one worker: opened by Hello and Welcome, kept alive by pings, carrying requests and step outputs.

    up -> Hello -> Welcome: open -> Submit, Abort, Finish, Ping ... StepOutputs -> down, or Refused: broken -> Hello again

What a worker knew of this router before a break is gone: it aborts our requests when we say Hello again. So a break ends
every request on the link, and a link that opens carries none.
"""

from __future__ import annotations

from typing import Protocol, assert_never

from kvrelay.errors import ProtocolError
from kvrelay.ids import RouterId
from kvrelay.planes.connection import Connection
from kvrelay.wire import OLDEST_PROTOCOL_VERSION, agreed
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import WorkerRecord
from kvrelay.wire.serving import Hello, KeptTold, Ping, Refused, StepOutputs, ToRouter, ToWorker, Welcome, since

_decoder: Decoder[ToRouter] = Decoder(ToRouter)
_PING = encode(Ping())


class LinkOwner(Protocol):
    """Told what happens on a link. Nothing here may raise."""

    def link_opened(self, record: WorkerRecord) -> None: ...

    def link_broken(self, reason: str) -> None:
        """Only after `link_opened`, once per opening."""

    def link_outputs(self, outputs: StepOutputs) -> None: ...

    def link_told(self, told: KeptTold) -> None: ...

    def link_malformed(self, reason: str) -> None: ...


class WorkerLink:
    """One connection and its handshake. `problem` says why the link is not open; it is empty while it is. `version` is the
    protocol spoken on it: the worker's own, if that is older than ours."""

    def __init__(self, record: WorkerRecord, owner: LinkOwner, *, router_id: RouterId, registration_s: float) -> None:
        self.problem = "connecting"
        self._worker_id = record.id
        self._owner = owner
        self.version = agreed(record.version)
        self._hello = encode(Hello(version=self.version, router_id=router_id, silence_s=registration_s))
        self._connection = Connection(
            record.serving_address,
            identity=router_id.encode(),
            silence_s=registration_s,
            on_up=self._on_up,
            on_down=self._on_down,
            on_message=self._on_message,
        )

    @property
    def is_open(self) -> bool:
        return not self.problem

    def knows(self, message: ToWorker) -> bool:
        """Whether the worker's version has this message, with all that it says."""
        return since(message) <= self.version

    def send(self, message: ToWorker) -> bool:
        """False: the link is not open, the worker does not keep up, or its version does not know such a message."""
        return not self.problem and self.knows(message) and self._connection.send(encode(message))

    def tick(self) -> None:
        """Every third of a lease: shows the worker that we live, or asks again for a link."""
        self._connection.send(self._hello if self.problem else _PING)

    def drain(self) -> None:
        """What the worker said last counts, though another socket was quicker to say that it left."""
        self._connection.drain()

    def close(self) -> None:
        """Silent: the owner is not told."""
        self.problem = "closed"
        self._connection.close()

    def _on_up(self) -> None:
        self._connection.send(self._hello)

    def _on_down(self) -> None:
        self._break("the connection to the worker broke")

    def _break(self, reason: str) -> None:
        was_open, self.problem = self.is_open, reason
        if was_open:
            self._owner.link_broken(reason)

    def _on_message(self, frame: bytes) -> None:
        try:
            message = _decoder.decode(frame)
        except ProtocolError as error:
            self._owner.link_malformed(str(error))
            return
        match message:
            case StepOutputs():
                self._on_outputs(message)
            case KeptTold():
                self._owner.link_told(message)
            case Welcome():
                self._on_welcome(message)
            case Refused():
                self._break(f"the worker refused this router: {message.reason}")
            case _:
                assert_never(message)

    def _on_outputs(self, message: StepOutputs) -> None:
        if message.worker_id != self._worker_id:
            self._owner.link_malformed(f"outputs of {message.worker_id} on the link to {self._worker_id}")
        elif not self.problem:
            self._owner.link_outputs(message)

    def _on_welcome(self, message: Welcome) -> None:
        if not OLDEST_PROTOCOL_VERSION <= message.version <= self.version:
            self._break(f"the worker speaks protocol {message.version}, this router said {self.version}")
        elif message.worker.id != self._worker_id:
            self._break(f"{message.worker.id} answers where {self._worker_id} was")
        elif self.problem:
            self.version, self.problem = message.version, ""
            self._owner.link_opened(message.worker)
