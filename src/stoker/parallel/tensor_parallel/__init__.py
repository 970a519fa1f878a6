"""Tensor parallelism: matrices, heads and the vocabulary split over processes. `tensor.py` is the entry."""
