"""``sft``: training on the answers of conversations."""

from __future__ import annotations

from stoker.job.task_spec import Decided, TaskSpec
from stoker.train.language.language_training import LanguageTraining

TASK = TaskSpec(
    name="sft",
    defaults=lambda _: {"train.lr": Decided(2e-5, "full tuning of trained weights")},
    language=LanguageTraining(),
)
