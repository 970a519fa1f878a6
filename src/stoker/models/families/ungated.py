"""LLaMA's blocks with an MLP of two matrices: Arcee, Jais 2, Nemotron, StarCoder 2, Apertus, nanochat."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.facts import Region
from stoker.models.families.llama import ATTENTION, LLAMA
from stoker.models.families.qwen import NORMED

MLP = Region(enter="mlp", column=("mlp.up_proj",), row=("mlp.down_proj",))

ARCEE = replace(LLAMA, name="arcee", regions=(ATTENTION, MLP))
JAIS2 = replace(ARCEE, name="jais2")
NEMOTRON = replace(ARCEE, name="nemotron")
STARCODER2 = replace(
    LLAMA,
    name="starcoder2",
    regions=(ATTENTION, Region(enter="mlp", column=("mlp.c_fc",), row=("mlp.c_proj",))),
)
APERTUS = replace(
    LLAMA,
    name="apertus",
    regions=(NORMED, replace(MLP, shared=("mlp.act_fn",))),  # its activation, xIELU, has two trained numbers
    whole=("attention_layernorm", "feedforward_layernorm"),
)
NANOCHAT = replace(
    LLAMA,
    name="nanochat",
    regions=(NORMED, Region(enter="mlp", column=("mlp.fc1",), row=("mlp.fc2",))),
    refused={"pipeline": "its code applies the last norm before the first block too, and would do so on every stage"},
)
