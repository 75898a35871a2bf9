"""Endpoints that generate nothing: models, health, cluster, metrics, administration, continuations, tokenising, OpenAPI; and
the pages for browsers."""
