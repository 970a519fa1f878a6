"""A stage of a pipeline: some of a model's blocks, by the facts of its family.

The model's own code runs unchanged. A later stage gets hidden states as ``inputs_embeds``, together with the
positions of the tokens: what would be added to embeddings is zero there, and what would change them hands them on.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from stoker.models.families.facts import Family, find


class Zero(nn.Module):
    """Gives zero, whatever it is asked: stands for positions that the first stage has added."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Shape ()."""
        return torch.zeros(())


def cut_stage(model: nn.Module, family: Family, blocks: range) -> None:
    """Leaves of a causal language model, in place, what a stage needs.

    The blocks keep their numbers and all parameters their names. The head stays on the last stage; where it is
    tied, it keeps the embedding's parameter.

    Args:
        blocks: the numbers of the stage's blocks.
    """
    held = dict(model.get_submodule(family.blocks).named_children())
    kept = nn.ModuleList()
    for number in blocks:
        kept.add_module(str(number), held[str(number)])
    model.set_submodule(family.blocks, kept)
    body: Any = model.base_model
    kinds = getattr(body.config, "layer_types", None)
    if kinds is not None:  # indexed by the position in the list of blocks
        body.config = copy(body.config)
        body.config.layer_types = kinds[blocks.start : blocks.stop]
    if blocks.start > 0:
        stand_ins = {"absent": None, "zero": Zero(), "identity": nn.Identity()}
        for path, what in family.first.items():
            _replace(model, path, stand_ins[what])
    if blocks.stop < len(held):
        for path in family.last:
            _replace(model, path, nn.Identity())
        head = model.get_output_embeddings()  # type: ignore[operator]
        _replace(model, next(name for name, module in model.named_modules() if module is head), None)


def _replace(model: nn.Module, path: str, by: nn.Module | None) -> None:
    if find(model, path) is not None:
        holder, _, name = path.rpartition(".")
        setattr(model.get_submodule(holder), name, by)
