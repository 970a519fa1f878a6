"""Gemma 4 (text): Gemma 3's blocks whose heads differ by the kind of layer; some with experts beside the MLP.

The small models read a second embedding of the token in every block, and their last blocks use keys and values of
earlier ones: such a model cannot be cut into stages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from stoker.models.families.facts import Region
from stoker.models.families.gemma import GEMMA3
from stoker.models.families.llama import ATTENTION, MLP


def from_ids(model: nn.Module, ids_BT: Tensor) -> dict[str, Tensor]:
    """Returns the embeddings for every block, if the model has them."""
    body: Any = model.base_model
    return {"per_layer_inputs": body.get_per_layer_inputs(ids_BT, None)} if body.hidden_size_per_layer_input else {}


GEMMA4 = replace(
    GEMMA3,
    name="gemma4_text",
    first={
        **GEMMA3.first,
        **dict.fromkeys(
            ("model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"),
            "absent",
        ),
    },
    regions=(
        replace(
            ATTENTION,
            column=("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"),  # only queries are in every block
            shared=("self_attn.q_norm", "self_attn.k_norm"),
        ),
        MLP,
        Region(enter="router", shared=("router",)),
        Region(enter="experts", experts="experts"),
    ),
    whole=(
        *GEMMA3.whole,
        *("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        *("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
    ),
    from_ids=from_ids,
    refused_with={
        ("pipeline", "hidden_size_per_layer_input"): "its blocks read embeddings of the tokens, which only the first "
        "stage has",
        ("pipeline", "num_kv_shared_layers"): "its last blocks use keys and values of earlier ones, which may be on "
        "another stage",
    },
)
