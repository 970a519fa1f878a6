"""Layout facts of model families, one small file each, and their table."""

from __future__ import annotations

from stoker.models.families.afmoe import AFMOE
from stoker.models.families.bloom import BLOOM
from stoker.models.families.cohere import COHERE, COHERE2
from stoker.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from stoker.models.families.delta_net import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from stoker.models.families.ernie_moe import ERNIE4_5_MOE, HUNYUAN_V1_MOE
from stoker.models.families.exaone import EXAONE4
from stoker.models.families.facts import Family
from stoker.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULTGEMMA
from stoker.models.families.gemma4 import GEMMA4
from stoker.models.families.glm import GLM, GLM4
from stoker.models.families.glm_moe import DOTS1, EXAONE_MOE, GLM4_MOE, SOLAR_OPEN
from stoker.models.families.gpt2 import GPT2
from stoker.models.families.gpt_neo import GPT_NEO
from stoker.models.families.gpt_neox import GPT_NEOX
from stoker.models.families.gpt_oss import GPT_OSS
from stoker.models.families.gptj import GPTJ
from stoker.models.families.granite import GRANITE, GRANITEMOE
from stoker.models.families.hunyuan import HUNYUAN
from stoker.models.families.llama import LLAMA, SAME_BLOCKS
from stoker.models.families.llama4 import LLAMA4
from stoker.models.families.mimo import MIMO_V2_FLASH
from stoker.models.families.mistral import MISTRAL, MIXTRAL
from stoker.models.families.olmo import OLMO, OLMO2, OLMO3
from stoker.models.families.olmoe import MINIMAX_M2, OLMOE
from stoker.models.families.opt import OPT
from stoker.models.families.phi import PHI, PHI3, PHIMOE
from stoker.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from stoker.models.families.sparse_latent import DEEPSEEK_V32, GLM_MOE_DSA
from stoker.models.families.stablelm import STABLELM
from stoker.models.families.ungated import APERTUS, ARCEE, JAIS2, NANOCHAT, NEMOTRON, STARCODER2

ALL = (
    *(GPT2, BLOOM, OPT, GPT_NEO, GPTJ, GPT_NEOX, LLAMA, GLM, GLM4, QWEN2, QWEN3, MISTRAL, MIXTRAL),
    *(QWEN2_MOE, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3, PHI, PHI3, GRANITE, COHERE),
    *(COHERE2, *SAME_BLOCKS, OLMO, OLMO2, OLMO3, STABLELM, EXAONE4, HUNYUAN),
    *(ARCEE, NEMOTRON, STARCODER2, APERTUS, NANOCHAT),
    *(GPT_OSS, GLM4_MOE, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE_LITE, OLMOE, GRANITEMOE, ERNIE4_5_MOE),
    *(MINIMAX_M2, HUNYUAN_V1_MOE, DOTS1, PHIMOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE),
    *(LLAMA4, GEMMA4, DEEPSEEK_V32, GLM_MOE_DSA, EXAONE_MOE, SOLAR_OPEN, JAIS2, VAULTGEMMA),
    *(AFMOE, MIMO_V2_FLASH),
)
FAMILIES: dict[str, Family] = {family.name: family for family in ALL}


def family_of(config: object) -> Family | None:
    """Returns the facts of a model by its configuration's ``model_type``; None for unknown types."""
    return FAMILIES.get(str(getattr(config, "model_type", "")))
