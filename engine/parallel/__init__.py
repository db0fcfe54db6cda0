"""Tensor parallel: the layers of a model split among processes, its ranks (weights/sharding.py says how)."""
