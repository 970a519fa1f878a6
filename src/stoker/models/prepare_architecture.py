"""Converts a model between the form that is trained and the one that transformers saves.

In training, in every layout, fused layers are split and attention goes through transformers' interface.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from stoker.models.families import family_of
from stoker.models.split_fused import ParameterSource, join_fused, split_fused


def training_form(model: PreTrainedModel) -> dict[str, ParameterSource]:
    """Converts a model for training, in place, by the facts of its family.

    Must come before adapters are inserted. Works on the meta device too. A quantised model keeps its layers, as their
    packed weights have no rows.

    Returns:
        The sources of the parameters that a checkpoint does not hold under their own name.
    """
    family = family_of(model.config)
    if family is None:
        return {}
    if family.attend is not None:
        family.attend(model)
    return {} if getattr(model, "hf_quantizer", None) is not None else split_fused(model, family)


def saved_form(model: PreTrainedModel) -> None:
    """Converts a model to the form that transformers saves, in place. Its adapters must have been merged."""
    family = family_of(model.config)
    if family is not None and getattr(model, "hf_quantizer", None) is None:
        join_fused(model, family)
