"""Fault detection: heartbeats and their watchdog, device tests, stack dumps of hangs, injected faults."""
