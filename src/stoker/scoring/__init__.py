"""Scores of answers, for evaluation and rewards: expected answers, scorers, a sandbox for code."""
