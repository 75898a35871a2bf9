"""The relay: how a producer hands memory over to a consumer, whatever is in it. What is special to KV or to embeddings stands
in the folders of that name; a further kind of memory is another folder beside them (`seam.py` says what it must bring)."""
