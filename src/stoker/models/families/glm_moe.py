"""GLM-4.5, dots.llm1, K-EXAONE, Solar Open: LLaMA's attention, dense blocks first, experts with shared ones after."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.deepseek import SHARED_EXPERTS
from stoker.models.families.llama import ATTENTION, LLAMA, MLP
from stoker.models.families.qwen import NORMED

GLM4_MOE = replace(LLAMA, name="glm4_moe", regions=(NORMED, MLP, SHARED_EXPERTS))
DOTS1 = replace(GLM4_MOE, name="dots1")
EXAONE_MOE = replace(GLM4_MOE, name="exaone_moe")
SOLAR_OPEN = replace(LLAMA, name="solar_open", regions=(ATTENTION, SHARED_EXPERTS))  # no dense blocks
