"""Pipelines in time: the order of each schedule, the time of each action, and the idle time."""
