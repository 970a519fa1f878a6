"""Starts a run's processes on this machine, or joins those that a launcher started."""
