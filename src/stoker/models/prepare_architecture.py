"""The form in which a model is trained, and the one in which it is saved.

Trained: fused layers split, attention through transformers' interface; the same in every layout, for one process
too. Saved: what transformers itself writes and reads.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from stoker.models.families import family_of
from stoker.models.split_fused import ParameterSource, join_fused, split_fused


def training_form(model: PreTrainedModel) -> dict[str, ParameterSource]:
    """Brings a model into the form in which it is trained, in place, by the facts of its family.

    Must come before adapters are inserted. Works on the meta device too. A quantised model keeps its layers: their
    packed weights have no rows.

    Returns:
        Where parameters lie on disk that do not lie there under their own name.
    """
    family = family_of(model.config)
    if family is None:
        return {}
    if family.attend is not None:
        family.attend(model)
    return {} if getattr(model, "hf_quantizer", None) is not None else split_fused(model, family)


def saved_form(model: PreTrainedModel) -> None:
    """Brings a model back into the form that transformers saves, in place. Its adapters are merged before."""
    family = family_of(model.config)
    if family is not None and getattr(model, "hf_quantizer", None) is None:
        join_fused(model, family)
