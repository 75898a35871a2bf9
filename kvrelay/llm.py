"""The offline API: a model without a server.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].text)

`LLM` computes in the calling thread. `AsyncLLM` computes in a thread of its own and gives asynchronous streams. With counts of
workers, as in `LLM("smollm2", prefill=1, decode=1)`, both start worker processes and relay through them as `kvrelay serve`
does; this process then computes nothing, and never loads PyTorch.
"""

from __future__ import annotations

import asyncio
import queue
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvrelay.checkpoint.fetch import resolve
from kvrelay.cluster import LocalCluster
from kvrelay.config import read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError, EngineClosedError, InternalError, request_error
from kvrelay.ids import RequestId, new_request_id
from kvrelay.offline import EngineHere, EngineThread, OfflineOptions, Prompt, as_batch, as_params, split_options
from kvrelay.outputs import Answers, Assembly, RequestOutput, prepare
from kvrelay.progress import Progress, Silent
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import Abort, Finish, Submit
