"""MiMo V2 Flash: layers with a sliding window have more key-value heads, and a learnt sink for each head.

Values are smaller than keys. Dense blocks first, then experts.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import ATTENTION, LLAMA, MLP
from stoker.models.families.mistral import EXPERTS

MIMO_V2_FLASH = replace(LLAMA, name="mimo_v2_flash", regions=(ATTENTION, MLP, EXPERTS), per_head=("self_attn.sinks",))
