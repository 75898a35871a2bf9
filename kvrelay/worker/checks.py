"""What a router may have got wrong in a message, beyond what decoding finds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvrelay.errors import ProtocolError
from kvrelay.ids import as_kept_id, as_request_id, as_transfer_id, as_worker_id
from kvrelay.wire.serving import EmbeddingTransfer, Keep, Submit, TransferInfo


def check_submit(submit: Submit) -> None:
    """All ids, before anything is begun under one of them. Raises ProtocolError."""
    as_request_id(submit.request_id)
    if submit.keep is not None:
        _check_keep(submit.keep, submit.params.n)
    if submit.transfer is not None:
        check_transfers([submit.transfer])
    check_transfers(submit.embeddings)


def check_transfers(transfers: Sequence[TransferInfo | EmbeddingTransfer]) -> None:
    for transfer in transfers:
        as_transfer_id(transfer.transfer_id)
        as_worker_id(transfer.producer)
        as_worker_id(transfer.consumer)


def _check_keep(keep: Keep, num_samples: int) -> None:
    for kept_id in keep.kept_ids:
        as_kept_id(kept_id)
    if len(keep.kept_ids) != num_samples:
        raise ProtocolError(f"{len(keep.kept_ids)} kept ids for {num_samples} samples")
    if not 0.0 < keep.ttl_s < math.inf:
        raise ProtocolError(f"KV is not kept for {keep.ttl_s} s")
