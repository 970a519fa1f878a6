"""Ranking models: a dense tower over vectors of features. Each file is one architecture, with its paper."""
