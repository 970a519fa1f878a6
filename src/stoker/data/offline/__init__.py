"""Data sets that need no network."""
