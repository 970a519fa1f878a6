"""Pipelines in time: orders of schedules, when each action runs, what is waited for."""
