"""Rollouts: answers that a policy samples during training, which are scored, stored and trained on."""

import stoker.job  # noqa: F401 - first, as the tasks that it loads import files of this folder
