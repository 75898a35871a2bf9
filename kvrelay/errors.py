"""Every error a user or a peer can cause. What only we can cause is an `assert`.

KVRelayError
├── RequestError                 reaches the client as OpenAI's error JSON
│   ├── InvalidRequestError      400, names the field
│   ├── UnauthorizedError        401
│   ├── ForbiddenError           403
│   ├── NotFoundError            404
│   ├── MethodNotAllowedError    405
│   ├── ConflictError            409
│   ├── TooLargeError            413
│   ├── QueueFullError           429, with Retry-After
│   ├── InternalError            500
│   ├── UnavailableError         503
│   │   ├── HandOverError        a decode worker's KV did not arrive; the router sends the request again
│   │   └── MissingEmbeddingError  an image's embeddings did not arrive, or are gone; the router sends the request again
│   └── DeadlineError            504
├── ConfigError                  a command line or config file that cannot work
├── ModelError                   a checkpoint that cannot be fetched, read or served
│   ├── DownloadError
│   ├── UnsupportedModelError
│   ├── MissingTensorError
│   └── WrongShapeError
├── MediaError                   an image that cannot be fetched, read or used; the front end says which one
├── EmbeddingTooLargeError       an embedding that no empty pool could hold
├── ProtocolError                a peer sent something we do not understand
│   ├── WrongIdError
│   └── VersionMismatchError
├── ContextIndexError            a context index could not be told something; it may pass
│   ├── IndexNotReadyError       it has no index yet
│   └── IndexRefusedError        it would refuse the same again
├── RankDiedError                a rank of a tensor-parallel worker has ended, and with it the worker
├── WorkerDiedError              a worker that `serve` started ended before it was ready, or too often
├── EngineClosedError            submitted to an engine that is draining or gone
└── BenchError                   a benchmark that could not be carried out
"""

from __future__ import annotations


class KVRelayError(Exception):
    """Root of all our errors."""


class RequestError(KVRelayError):
    """Ends one request. `status` and `kind` are what HTTP shows; `param` names the offending field."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(RequestError):
    status = 400
    kind = "invalid_request_error"


class UnauthorizedError(RequestError):
    status = 401
    kind = "authentication_error"


class ForbiddenError(RequestError):
    """The key is valid, but not for this."""

    status = 403
    kind = "permission_error"


class NotFoundError(RequestError):
    status = 404
    kind = "not_found_error"


class MethodNotAllowedError(RequestError):
    status = 405
    kind = "invalid_request_error"


class ConflictError(RequestError):
    """What was asked for is under way, or is so already."""

    status = 409
    kind = "conflict_error"


class TooLargeError(RequestError):
    status = 413
    kind = "invalid_request_error"


class QueueFullError(RequestError):
    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class InternalError(RequestError):
    status = 500
    kind = "internal_error"


class UnavailableError(RequestError):
    status = 503
    kind = "service_unavailable_error"


class HandOverError(UnavailableError):
    """The KV that a decode worker was waiting for will not come. The router sends the request again; no client sees this
    unless every attempt ended so. `by_producer`: the prefill worker ended it, and says itself why."""

    kind = "hand_over_error"

    def __init__(self, message: str, *, by_producer: bool = False) -> None:
        super().__init__(message)
        self.by_producer = by_producer


class MissingEmbeddingError(UnavailableError):
    """The embeddings of an image that a worker has to compute will not come, or are gone. The router sends the request again,
    with an encode worker. `digest` is the image's if it was to come from one, whose fault it then is."""

    kind = "missing_embedding_error"

    def __init__(self, message: str, *, digest: str | None = None) -> None:
        super().__init__(message)
        self.digest = digest


class DeadlineError(RequestError):
    status = 504
    kind = "timeout_error"


class ConfigError(KVRelayError):
    """A command line or config file that cannot work."""


class ModelError(KVRelayError):
    """A checkpoint that cannot be fetched, read or served."""


class DownloadError(ModelError):
    """The checkpoint could not be fetched."""


class UnsupportedModelError(ModelError):
    """An architecture, or a feature of one, that we do not implement."""


class MissingTensorError(ModelError):
    """The checkpoint lacks a tensor the model needs."""


class WrongShapeError(ModelError):
    """A tensor of the checkpoint has another shape than the config says."""


class MediaError(KVRelayError):
    """An image that cannot be fetched, read or used. The front end answers 400 and names the part."""


class EmbeddingTooLargeError(KVRelayError):
    """An embedding, or its aux data, that does not even fit an empty pool."""


class ProtocolError(KVRelayError):
    """A peer sent something we do not understand. Counted and answered, never fatal."""


class WrongIdError(ProtocolError):
    """An id of another kind, or of no kind, where a certain one belongs."""


class VersionMismatchError(ProtocolError):
    """A peer of another protocol version or another model."""


class ContextIndexError(KVRelayError):
    """A context index could not be told something. It may work the next time."""


class IndexNotReadyError(ContextIndexError):
    """The context index has nothing in it yet, so there is nothing to remove."""


class IndexRefusedError(ContextIndexError):
    """The context index does not take what it was told, and would not take it the next time."""


class RankDiedError(KVRelayError):
    """A worker without one of its ranks can compute nothing."""


class WorkerDiedError(KVRelayError):
    """A worker that `serve` started ended before it was ready, or too often."""


class EngineClosedError(KVRelayError):
    """Submitted to an engine that is draining or gone."""


class BenchError(KVRelayError):
    """A benchmark that could not be carried out."""
