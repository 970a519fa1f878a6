"""Faults injected into a run on purpose, and a comparison of its end with an undisturbed run."""
