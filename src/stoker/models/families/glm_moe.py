"""GLM-4.5 and dots.llm1: LLaMA's attention, dense blocks first, experts with shared ones after them."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.deepseek import SHARED_EXPERTS
from stoker.models.families.llama import LLAMA, MLP
from stoker.models.families.qwen import NORMED

GLM4_MOE = replace(LLAMA, name="glm4_moe", regions=(NORMED, MLP, SHARED_EXPERTS))
DOTS1 = replace(GLM4_MOE, name="dots1")
