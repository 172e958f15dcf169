"""Embeddings as tables."""

READERS: dict = {}
