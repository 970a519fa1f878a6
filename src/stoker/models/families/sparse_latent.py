"""DeepSeek V3.2 and GLM-5: DeepSeek V3's blocks, whose attention sees the keys that an indexer selects.

Every process has the whole indexer. Its weights are not trained: a selection has no gradient.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from stoker.models.attention.selected_keys import select_by_document
from stoker.models.families.deepseek import DEEPSEEK_V3, LATENT, SHARED_EXPERTS
from stoker.models.families.llama import LLAMA, MLP


def attend(model: nn.Module) -> None:
    """Attention whose indexers select within the documents of a packed row."""
    for block in model.get_submodule(LLAMA.blocks).children():
        select_by_document(block.get_submodule("self_attn"))


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    regions=(replace(LATENT, column=("self_attn.q_b_proj", "self_attn.kv_b_proj")), MLP, SHARED_EXPERTS),
    whole=(*DEEPSEEK_V3.whole, "self_attn.indexer"),
    untrained=("self_attn.indexer",),
    attend=attend,
    by_document=("indexed_attention",),
    refused={"context": "its indexers select among the keys of a whole document, of which each process has a part"},
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    refused_with={
        ("pipeline", "indexer_types=shared"): "some of its blocks use keys that an earlier one has selected, which may "
        "be on another stage",
    },
)
