"""OLMoE and MiniMax-M2: experts in every block, and norms over the queries and keys of all heads together."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import LLAMA
from stoker.models.families.mistral import EXPERTS
from stoker.models.families.olmo import WIDE_NORMED

OLMOE = replace(LLAMA, name="olmoe", regions=(WIDE_NORMED, EXPERTS))
MINIMAX_M2 = replace(OLMOE, name="minimax_m2")
