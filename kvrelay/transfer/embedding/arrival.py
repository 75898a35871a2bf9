"""What a consumer of embeddings gets."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvrelay.ids import TransferId
from kvrelay.transfer.embedding.pieces import Piece


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EmbeddingArrival:
    """Further tokens of an embedding, in order; or all of them; or the error with which it ended.

    Pieces of a complete arrival may lie in the pool, in `blocks`: they are good until the embedding is released. Earlier pieces
    are their holder's own. With an error, what came before is still right but will not be completed.
    """

    transfer_id: TransferId
    pieces: tuple[Piece, ...] = ()
    total_tokens: int = 0
    aux: tuple[int, ...] = ()  # without the number of tokens; of every arrival the same
    is_complete: bool = False
    blocks: tuple[int, ...] = ()
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """So many tokens, from the first on, are there."""
        return self.pieces[-1].stop if self.pieces else 0


class Round(msgspec.Struct, frozen=True):
    """Tokens [first_token, first_token + num_tokens) in these blocks of the pool, of which nothing will be written any more."""

    blocks: tuple[int, ...]
    first_token: int
    num_tokens: int
