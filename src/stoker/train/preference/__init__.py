"""Losses of preferences and rewards, and the reference model that they compare with."""
