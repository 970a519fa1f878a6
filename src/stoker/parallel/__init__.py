"""Parallelism: what is applied to a single-device model, one file each."""
