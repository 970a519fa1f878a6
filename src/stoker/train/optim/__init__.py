"""Optimizers, their states in low precision, and the schedule of the learning rate."""
