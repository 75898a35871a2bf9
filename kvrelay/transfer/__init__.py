"""Moves bytes between workers: KV caches from prefill to decode, embeddings from encode to prefill, by one relay."""
