"""Endpoints that generate nothing: models, health, cluster, metrics, administration, continuations, tokenising, OpenAPI."""
