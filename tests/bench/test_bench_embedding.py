"""The measurement of the embedding relay measures what it says."""

from __future__ import annotations

import pytest

from kvrelay.bench.encode.transfer import measure


@pytest.mark.long
def test_every_way_moves_the_embedding_with_the_resumes_it_is_named_for() -> None:
    results = measure("shm", rounds=1)
    assert (results["shm_resumes"], results["shm_many_resumes"]) == (1.0, 9.0)
    assert all(value > 0 for value in results.values())
