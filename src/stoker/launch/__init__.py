"""Starts a run's processes on this machine, or joins the processes that a launcher started."""
