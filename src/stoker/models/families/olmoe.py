"""OLMoE and MiniMax-M2: experts in every block, and norms over the queries and keys of all heads together."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import LLAMA
from stoker.models.families.mistral import EXPERTS
from stoker.models.families.qwen import NORMED

OLMOE = replace(
    LLAMA,
    name="olmoe",
    regions=(NORMED, EXPERTS),
    refused={"tensor": "its norms of queries and keys are over all heads together, of which a process has a part"},
)
MINIMAX_M2 = replace(OLMOE, name="minimax_m2")
