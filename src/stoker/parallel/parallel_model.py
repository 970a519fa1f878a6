"""A process' part of a model that is distributed over several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from stoker.parallel.gradients import Gradients
from stoker.parallel.shard_spec import NamedShards

if TYPE_CHECKING:
    from stoker.models.language_model import LanguageModel
    from stoker.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class ParallelModel:
    """This process' part of a model.

    Attributes:
        model: contains the parameters; with a pipeline, a list of its stages.
        language: lays out rows; None for other modules.
        root: the module that is called for a forward pass; None with a pipeline.
        pipeline: runs the stages; None without a pipeline.
        shards: of the parameters of ``model``.
        gradients: of the trained parameters.
    """

    model: nn.Module
    language: LanguageModel | None
    root: nn.Module | None
    pipeline: Pipeline | None
    shards: NamedShards
    gradients: Gradients
