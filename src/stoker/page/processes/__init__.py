"""Processes that the page starts: verbs, the queue of jobs, servers of models."""
