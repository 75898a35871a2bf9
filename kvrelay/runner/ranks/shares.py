"""Which part of each weight a rank has.

    q, k, v, gate, up     rows: the rank's heads, its columns of the MLP
    output, down          columns: those that its rows feed; the bias is rank 0's
    norms                 whole, in every rank

A rank has as many query heads as the others. Where the KV heads cannot be split evenly, a rank computes some of its neighbour's
again, and their columns of the output are zero, so that each head is summed once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.errors import ConfigError
from kvrelay.kernels.base import Quantised
from kvrelay.kernels.fp8 import movable
from kvrelay.models.layers import WeightSource
from kvrelay.wire.kv import MAX_RANKS, heads_of, heads_per_rank

SHARES = 2  # raised when a rank's share of the same weights becomes other bytes


def check_split(spec: ModelSpec, num_ranks: int) -> None:
    """Raises ConfigError for a model that cannot be split so."""
    group, ranks_per_head = spec.num_heads // spec.num_kv_heads, num_ranks / spec.num_kv_heads
    reason = ""
    if num_ranks > MAX_RANKS:
        reason = f"there can be {MAX_RANKS} ranks at most"
    elif spec.intermediate_size % num_ranks:
        reason = f"the MLP's {spec.intermediate_size} columns cannot be split evenly"
    elif num_ranks > spec.num_kv_heads and (not ranks_per_head.is_integer() or group % ranks_per_head):
        reason = f"{spec.num_heads} heads that share {spec.num_kv_heads} KV heads cannot be split evenly"
    elif num_ranks <= spec.num_kv_heads and heads_per_rank(spec.num_kv_heads, num_ranks) * (num_ranks - 1) >= spec.num_kv_heads:
        reason = f"{spec.num_kv_heads} KV heads would leave a rank without any"
    if reason:
        raise ConfigError(f"--tp {num_ranks}: {reason}")


class RankShare:
    """One rank's part of a model. `spec` is what its layers look like."""

    def __init__(self, whole: ModelSpec, rank: int, num_ranks: int) -> None:
        check_split(whole, num_ranks)
        self.whole, self.rank, self.num_ranks = whole, rank, num_ranks
        group = whole.num_heads // whole.num_kv_heads
        self.kv_heads = heads_of(whole.num_kv_heads, num_ranks, rank)
        if num_ranks <= whole.num_kv_heads:
            self.heads = range(self.kv_heads.start * group, self.kv_heads.stop * group)
        else:
            count = whole.num_heads // num_ranks
            self.heads = range(rank * count, (rank + 1) * count)
        self.inner = range(rank * whole.intermediate_size // num_ranks, (rank + 1) * whole.intermediate_size // num_ranks)
        self.spec = msgspec.structs.replace(
            whole, num_heads=len(self.heads), num_kv_heads=len(self.kv_heads), intermediate_size=len(self.inner)
        )

    @property
    def num_repeated_heads(self) -> int:
        """Of the first of its query heads: those that the rank before has, too."""
        if self.rank == 0 or self.num_ranks > self.whole.num_kv_heads:
            return 0
        before = heads_of(self.whole.num_kv_heads, self.num_ranks, self.rank - 1)
        return (before.stop - self.kv_heads.start) * (self.whole.num_heads // self.whole.num_kv_heads)

    @property
    def num_repeated_columns(self) -> int:
        """Of the output projection: those of the repeated heads, which are zero."""
        return self.num_repeated_heads * self.whole.head_dim

    def rows(self, part: str) -> tuple[slice, int] | None:
        """Of a projection: the rank's rows, and how many there are in all. None: it is not split by rows."""
        dim = self.whole.head_dim
        match part:
            case "q_proj":
                return slice(self.heads.start * dim, self.heads.stop * dim), self.whole.num_heads * dim
            case "k_proj" | "v_proj":
                return slice(self.kv_heads.start * dim, self.kv_heads.stop * dim), self.whole.num_kv_heads * dim
            case "gate_proj" | "up_proj":
                return slice(self.inner.start, self.inner.stop), self.whole.intermediate_size
            case _:
                return None

    def columns(self, part: str) -> tuple[slice, int] | None:
        return self.rows({"o_proj": "q_proj", "down_proj": "gate_proj"}.get(part, ""))


class RankSource:
    """Implements `WeightSource` for one rank: asks for whole tensors and hands out the rank's part."""

    def __init__(self, share: RankShare, source: WeightSource) -> None:
        self._share = share
        self._source = source

    def take_linear(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        part = name.split(".")[-2]
        rows, columns = self._share.rows(part), self._share.columns(part)
        if rows is not None:
            kept, total = rows
            weight, scale = self._source.take_linear(name, (total, *shape[1:]))
            return weight[kept].clone(), None if scale is None else scale[kept].clone()
        assert columns is not None, "every projection is split"
        kept, total = columns
        weight, scale = self._source.take_linear(name, (shape[0], total))
        weight = weight[:, kept].contiguous()
        if part == "o_proj":
            movable(weight)[:, : self._share.num_repeated_columns] = 0
        return weight, scale

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        *_, part, kind = name.split(".")
        if kind == "weight" and self._share.columns(part) is not None:
            return self.take_linear(name, shape)[0]
        rows = self._share.rows(part)
        if rows is not None:
            kept, total = rows
            return self._source.take(name, (total, *shape[1:]))[kept].clone()
        whole = self._source.take(name, shape)
        is_first = self._share.rank == 0 or self._share.columns(part) is None
        return whole if is_first else torch.zeros_like(whole)  # a bias of what is summed counts once

    def take_quantised(self, shapes: Mapping[str, tuple[int, int]], cut: int = 0) -> list[Quantised] | None:
        """Matrices that are taken together are all split by rows, or there is one, which may be split by columns."""
        columns = self._share.columns(next(iter(shapes)).split(".")[-2])
        if columns is not None:
            return self._some_columns(shapes, *columns)
        rows = [self._share.rows(name.split(".")[-2]) or (slice(None), shape[0]) for name, shape in shapes.items()]
        wanted = {name: (total, shape[1]) for (name, shape), (_, total) in zip(shapes.items(), rows, strict=True)}
        found = self._source.take_quantised(wanted, cut)
        return found and [part.rows(kept) for part, (kept, _) in zip(found, rows, strict=True)]

    def _some_columns(self, shapes: Mapping[str, tuple[int, int]], kept: slice, total: int) -> list[Quantised] | None:
        ((name, shape),) = shapes.items()
        zeros = self._share.num_repeated_columns if name.endswith("o_proj.weight") else 0
        found = self._source.take_quantised({name: (shape[0], total)}, math.gcd(kept.start, kept.stop, zeros))
        return found and [part.columns(kept).with_zeros(zeros) if zeros else part.columns(kept) for part in found]
