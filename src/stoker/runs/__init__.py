"""Runs: a run is a folder (job, environment, events, metrics, checkpoints) that every verb only reads."""
