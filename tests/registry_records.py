"""Worker records for tests."""

from __future__ import annotations

import os

import msgspec

from kvrelay.ids import new_worker_id
from kvrelay.states import Role, WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import WorkerRecord


def make_record(**changes: object) -> WorkerRecord:
    record = WorkerRecord(
        id=new_worker_id("whole"),
        role=Role.WHOLE,
        state=WorkerState.READY,
        host="here",
        pid=os.getpid(),
        serving_address="tcp://127.0.0.1:1",
        model="tiny",
        fingerprint="tiny",
        max_model_len=128,
        max_batch=8,
        max_queue=8,
        version=PROTOCOL_VERSION,
    )
    return msgspec.structs.replace(record, **changes)
