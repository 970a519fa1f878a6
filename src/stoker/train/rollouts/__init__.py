"""Answers that a policy writes while it is trained: sampled, scored, kept, and learnt from."""
