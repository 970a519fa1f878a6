"""Parallelisms, which `parallelize.py` applies to a single-device model in a fixed order."""
