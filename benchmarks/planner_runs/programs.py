"""Programs that runs were published of: in which types they keep their numbers, and what they hide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from planner_runs.memory import fused_parts
from planner_runs.program import LateFrees, Program
from stoker.plan.software import STOKER

# A program with fused kernels and a distributed optimizer.
FUSED = {
    "weights": 2,
    "states": 12,
    "outer": 0,
    "muon": False,
    "memory": fused_parts,
    "flash": True,
    "traffic": 0.72,
    "wide_traffic": 0.72,
    "compiles": "never",
    "logit_traffic": 37.1,
    "sent_gradients": 2,
    "by_block": False,
    "hidden": 0.7,
    "hidden_most": 0.68,
    "hidden_tensor": 0.0,
    "hidden_experts": 0.0,
    "repeated_sums": 0.0,
    "exposed_sends": 0.2,
    "launch": 3e-4,
    "launch_tensor": 1e-4,
    "launch_across": (0.0, 0.0),
}


def _program(name: str, **does: Any) -> Program:
    return Program(name, **(FUSED | does))


# Before 2022 there was neither fused attention nor sequence parallelism.
MEGATRON_2021 = _program(
    "megatron of 2021",
    gradients=2,
    dropout=True,
    flash=False,
    traffic=0.385,
    launch=0.000981,
    launch_tensor=3.58e-05,
    hidden=0.204,
    hidden_most=0.753,
    exposed_sends=0.124,
)
MEGATRON = _program(
    "megatron",
    offload="optimizer",
    shard="zero1",
    sequence=True,
    logits=1.0,
    fused_gate=True,
    unsummed=2,
    traffic=2.88,
    launch=0.000201,
    hidden=0.488,
    hidden_most=0.611,
    hidden_tensor=0.383,
    hidden_experts=0.5,
    exposed_sends=0.201,
)
SIMUMAX = replace(MEGATRON, name="megatron without overlap", hidden_tensor=0.0, hidden_experts=0.0)
NANOTRON = _program(
    "nanotron",
    gradients=6,
    logits=7.1,
    later_logits=3.3,
    late=LateFrees(ahead=24, large=48 * 2**20, most=32),
    unsummed=2,
    first_stage=True,
    balanced=True,
    sequence=True,
    traffic=3.68,
    launch=0.00117,
    launch_tensor=0.000498,
    hidden=0.5,
    hidden_most=0.244,
    crowded=1.0,
    repeated_sums=0.8,
    launch_across=(2.6e-3, 9e-4),
    exposed_sends=0.3,
)
# Its published memory is 28 to 33 bytes for each parameter that a process holds, sharded or split.
# Its ZeRO-1 sends every process' part by itself.
INTERNEVO = _program("internevo", gradients=2, states=28, hidden=0.167, hidden_most=0.7)
ONEFLOW = replace(MEGATRON_2021, name="oneflow", logits=5.0, hidden=0.8, hidden_most=0.9)
# Its cross entropy is fused (flash-attn's): logits and their gradient in 16 bits.
FLOAT32 = _program("float32 weights", weights=4, gradients=4, states=8, logits=4.0)
COMPOSER = replace(FLOAT32, name="composer", unverified=0.1, offload="params")
# Its loss is compiled: logits and their gradient in 16 bits, and what the softmax keeps. Of FSDP2's gathers and
# scatters, which go beside the blocks before and after, only the outermost units' wait.
TORCHTITAN = replace(COMPOSER, name="torchtitan", sequence=True, logits=6.0, hidden_most=0.9)
# DeepSpeed's pipeline sends, and sums gradients, while nothing else is done.
BLOOM = replace(
    MEGATRON_2021,
    name="megatron-deepspeed",
    unverified=0.1,
    shard="zero1",
    gradients=4,
    hidden=0.0,
    hidden_most=0.0,
    exposed_sends=1.0,
)
DEEPSPEED = _program("deepspeed", unverified=0.1, gradients=2, offload="params")
TORCHTUNE = _program("torchtune", gradients=2, states=4, logits=10.0, recompute="full", offload="params", paged=True)
PEFT = replace(FLOAT32, name="peft", frozen=4, seq_len=512)
OWN = Program(**{each.name: getattr(STOKER, each.name) for each in fields(STOKER)}, sequence=True)
# What a row's source or framework says, and the software it means; the first that is found.
NAMES = (
    ("nanotron", NANOTRON), ("vtrain", MEGATRON_2021), ("sc21", MEGATRON_2021), ("korthikanti", MEGATRON_2021),
    ("oneflow/lang", ONEFLOW), ("dlperf", MEGATRON_2021), ("mt-nlg", BLOOM), ("bigscience", BLOOM), ("bloom", BLOOM),
    ("llm-foundry", COMPOSER), ("mosaic", COMPOSER), ("internevo", INTERNEVO), ("torchtitan", TORCHTITAN),
    ("torchtune", TORCHTUNE), ("peft", PEFT), ("megatron", MEGATRON), ("nemo", MEGATRON), ("simumax", SIMUMAX),
    ("megascale", MEGATRON), ("fsdp", TORCHTITAN), ("deepspeed", DEEPSPEED), ("zero paper", DEEPSPEED),
    ("stoker", OWN),
)  # fmt: skip


def program_of_row(row: Mapping[str, Any]) -> Program:
    """The software of a row of measurements, by its ``framework`` or its ``source``; Megatron where neither tells.

    Techniques that the name of the run says are taken into account: chunked cross entropy, which torchtune's later
    ones include, an optimizer that steps in the backward pass, and half-precision weights where DeepSpeed offloads.
    """
    name = str(row.get("model_name") or "").lower()
    software = _named(row)
    if software is TORCHTUNE and any(word in name for word in ("chunked", "backward", "offload", "lora")):
        software = replace(software, logits=0.0)
    if "optimizer in backward" in name or "activation offload" in name:
        software = replace(software, gradients=0)
    if software is BLOOM and "bf16" in str(row.get("precision")).lower():
        software = replace(software, gradients=6)  # as they are computed, and their sums in float32
    if software is PEFT and "deepspeed" in name:
        software = replace(software, weights=2, frozen=2)
    return software


def _named(row: Mapping[str, Any]) -> Program:
    for key in ("framework", "source"):
        said = str(row.get(key) or "").lower()
        for name, software in NAMES:
            if name in said:
                return software
    return MEGATRON
