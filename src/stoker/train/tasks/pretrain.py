"""``pretrain``: training on every token of a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.job.task_spec import Decided, RowSpec, TaskSpec
from stoker.train.language.language_training import LanguageTraining

if TYPE_CHECKING:
    from stoker.job.schema import Job


def _defaults(job: Job) -> dict[str, Decided]:
    from stoker.job.resolution.batch_triangle import is_scratch

    lr = Decided(1e-4, "pretraining continues gently from trained weights")
    if is_scratch(job):
        lr = Decided(1e-3, "a small model from random weights")
    elif job.model is not None and job.model.weights == "random":
        lr = Decided(3e-4, "usual for models of 0.5 to 10 B parameters from random weights")
    return {
        "train.lr": lr,
        "train.weight_decay": Decided(0.1, "usual in pretraining"),
        "train.beta2": Decided(0.95, "pretraining: forgets loss spikes sooner"),
        "train.pack": Decided(True, "documents fill whole sequences in pretraining"),
        "data.too_long": Decided("split", "pretraining uses every token of a long document"),
    }


TASK = TaskSpec(name="pretrain", defaults=_defaults, batch=16, rows=RowSpec(chat=False), language=LanguageTraining())
