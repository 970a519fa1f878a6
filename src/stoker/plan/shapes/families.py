"""One function for each kind of architecture: from the keys of its configuration to its shape.

The facts (which products have a bias, how many norms, which layers are sparse) are those of the models' code in
transformers 5; a test counts every family against it.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.plan.shape import Shape
from stoker.plan.shapes import dense_families as dense
from stoker.plan.shapes import hybrid_families as hybrid
from stoker.plan.shapes import mixture_families as mixture
from stoker.plan.shapes.config_keys import Settings

FAMILIES: dict[str, Callable[[Settings], Shape]] = {
    **{"gpt2": dense.gpt2, "bloom": dense.bloom, "opt": dense.opt, "mpt": dense.mpt, "falcon": dense.falcon},
    **{"gpt_neo": dense.gpt_neo, "gptj": dense.gptj, "gpt_neox": dense.gpt_neox},
    **dict.fromkeys(("llama", "mistral", "granite", "smollm3"), dense.llama),
    **{"qwen2": dense.qwen2, "qwen3": dense.qwen3, "glm": dense.glm, "glm4": dense.glm4},
    **{"gemma": dense.gemma, "gemma2": dense.gemma2, "gemma3_text": dense.gemma3},
    **{"phi": dense.phi, "phi3": dense.phi3, "olmo2": dense.olmo2, "starcoder2": dense.starcoder2},
    **dict.fromkeys(("cohere", "cohere2"), dense.cohere),
    **{"mixtral": mixture.mixtral, "qwen2_moe": mixture.qwen2_moe, "qwen3_moe": mixture.qwen3_moe},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), mixture.deepseek),
    **{"deepseek_v32": mixture.deepseek_v32, "glm_moe_dsa": mixture.glm_moe_dsa},
    **dict.fromkeys(("olmoe", "minimax_m2"), mixture.olmoe),
    **{"glm4_moe": mixture.glm4_moe, "dots1": mixture.dots1, "granitemoe": mixture.granitemoe},
    **{"exaone_moe": mixture.exaone_moe, "solar_open": mixture.glm4_moe, "afmoe": mixture.afmoe},
    **{"ernie4_5_moe": mixture.ernie4_5_moe, "hunyuan_v1_moe": mixture.hunyuan_v1_moe, "phimoe": mixture.phimoe},
    **{"gpt_oss": mixture.gpt_oss, "llama4_text": mixture.llama4},
    **{"qwen3_next": hybrid.qwen3_next, "qwen3_5_text": hybrid.qwen3_5, "qwen3_5_moe_text": hybrid.qwen3_5_moe},
    **{
        "gemma4_text": hybrid.gemma4,
        "mimo_v2_flash": hybrid.mimo,
        "nemotron_h": hybrid.nemotron_h,
        "t5": hybrid.t5,
        "mt5": hybrid.t5,
    },
}
