"""Seconds of a step: passes, collectives, the optimizer, rollouts. `step_time.py` is the entry."""
