"""Evaluation of a model's answers: the user's own rows, prompt templates, two runs, and tasks of lm-eval."""
