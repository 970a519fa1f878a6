"""Parallelisms, which are applied to a single-device model, one file each."""
