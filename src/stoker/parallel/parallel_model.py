"""A process' part of a model that is distributed over several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from stoker.parallel.gradients import Gradients
from stoker.parallel.shard_spec import Piece

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
        pieces: by name in ``model``, of the parameters that are split over tensor processes.
        aliases: name in the whole model, by name in ``model``, if they differ.
        gradients: of the trained parameters.
    """

    model: nn.Module
    language: LanguageModel | None
    root: nn.Module | None
    pipeline: Pipeline | None
    pieces: Mapping[str, Piece]
    aliases: Mapping[str, str]
    gradients: Gradients
