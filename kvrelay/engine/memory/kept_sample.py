"""The kept KV of one sample, and what is noted of requests that will leave some or take some. `memory/kept.py` tells its
life."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.request import Sequence
from kvrelay.errors import InvalidRequestError
from kvrelay.ids import KeptId
from kvrelay.states import KEPT_EDGES, KeptState, advance
from kvrelay.wire.serving import Image, Keep, KeptInfo, Submit

GRACE_S = 1.0  # KV is kept so much longer than was said, so that no client's clock is ahead of ours


@dataclass(slots=True, eq=False)
class KeptSample:
    kept_id: KeptId
    owner: str
    kv: Sequence  # the sample as its client saw it; while its KV is on the device, it has the pinned blocks
    expires_s: float
    state: KeptState
    num_holds: int = 0  # children that have not taken what they inherit
    is_over: bool = False  # it is there for these only
    is_stuck: bool = False  # a copy to the host took too long: it is not tried again

    def become(self, state: KeptState) -> None:
        self.state = advance(KEPT_EDGES, self.state, state)

    def check_child(self, submit: Submit) -> None:
        """Raises what answers a request that is no child of this one."""
        parent = self.kv
        if submit.prompt[: len(parent.tokens)] != parent.tokens:
            what = "the prompt does not begin with the tokens of the parent's kept KV"
        elif submit.cache_salt != parent.request.cache_salt:
            what = "the parent has another cache_salt"
        elif submit.adapter != parent.request.adapter_digest:
            what = "the parent has another LoRA adapter, or none"
        elif _images(submit.images, len(parent.tokens)) != _images(parent.images, len(parent.tokens)):
            what = "the parent has other images"
        else:
            return
        raise InvalidRequestError(what, param="continuation_of")

    def info(self, now_s: float, num_blocks: int) -> KeptInfo:
        request = self.kv.request
        return KeptInfo(
            kept_id=self.kept_id,
            external_id=request.external_id,
            owner=self.owner,
            cache_salt=request.cache_salt,
            tokens=list(self.kv.tokens),
            num_prompt_tokens=self.kv.num_prompt_tokens,
            num_blocks=num_blocks,
            on_host=self.state is KeptState.ON_HOST,
            ttl_s=max(0.0, self.expires_s - GRACE_S - now_s),
            images=request.images,
            adapter=request.adapter_digest,
        )


@dataclass(slots=True)
class Due:
    """What has yet to be said of a request that asked to be kept."""

    keep: Keep
    samples: set[int]
    seen: dict[int, int] = field(default_factory=dict)  # sample -> output tokens that its client saw


@dataclass(slots=True)
class Heir:
    """What a child that has not started will take."""

    kept: KeptSample
    absent: list[int] = field(default_factory=list)  # which of its blocks have to come from the host


def verify_child(kv: KVCache, child: Sequence, parent: Sequence) -> None:
    """Fails if the child would take what it is not a child of."""
    assert child.tokens[: len(parent.tokens)] == parent.tokens, "a child of other tokens"
    fresh = kv.fresh_hashes(child, len(parent.hashes))
    assert fresh == parent.hashes, "the hashes of kept KV are not those of its tokens"
    for digest, block in zip(parent.hashes, parent.block_table, strict=False):
        known = kv.prefixes.content(block)[0] if block in kv.prefixes else digest
        assert known == digest, f"block {block} of kept KV is known for other tokens"


def _images(images: list[Image], num_tokens: int) -> list[tuple[str, int, int]]:
    """Those that begin within the first tokens."""
    return [(image.digest, image.start, image.num_tokens) for image in images if image.start < num_tokens]
