"""Checkpoints and the exports made from them."""
