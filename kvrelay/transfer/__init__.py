"""Moves bytes between workers: KV caches from prefill to decode, later embeddings from encode to prefill."""
