"""What an answer is worth, for evaluation and rewards alike: expected answers, scorers, a sandbox for code."""
