"""Rollouts: answers that a policy samples during training, which are scored, stored and trained on."""
