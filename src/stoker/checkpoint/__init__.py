"""Checkpoints: saved and restored whole, and what is exported from them."""
