"""``sft``: training on the answers of conversations."""

from __future__ import annotations

from stoker.job.task_spec import Decided, TaskSpec

TASK = TaskSpec(name="sft", defaults=lambda _: {"train.lr": Decided(2e-5, "full tuning of trained weights")})
