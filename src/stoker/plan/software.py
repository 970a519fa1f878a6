"""What the software that trains does with memory and time: in which type it keeps what, what it overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.job.layout import Recompute, Shard


@dataclass(frozen=True)
class Software:
    """How a training program keeps its numbers and orders its work. Sizes are bytes of one parameter or logit.

    Attributes:
        name: of the program.
        weights: the copy that computes.
        gradients: what micro-batches are summed in.
        states: what the optimizer keeps beside them: AdamW's two moments in float32, and master weights in float32
            where the copy that computes is a shorter one.
        logits: of a token's logits at the peak, with their softmax and gradient (16-bit logits, float32 of them,
            the gradients of both).
        later_logits: what is still held of the micro-batch before, when there is more than one.
        flash: whether the attention's scores are never kept (Dao et al., 2022).
        dropout: whether masks are kept.
        keeps_gathered: share of the inputs of split matrices that stay gathered until the backward pass, under
            sequence parallelism.
        balanced: whether pipeline stages are cut by arithmetic, the head included, instead of by blocks.
        shard: what it shards where nothing is said.
        recompute: what it computes again where nothing is said.
        sequence: whether tensor parallelism splits the activations outside of the matrices, too.
        fused: whether norms, rotary positions and nonlinearities are one kernel each.
        logit_traffic: bytes read and written per logit.
        sent_gradients: bytes of a gradient on its way.
        hidden: share of the passes beside which gradients and weights can travel.
        hidden_most: of their time, the share that can be hidden at most.
        hidden_tensor: share of tensor parallelism's collectives that matrix products hide.
        exposed_sends: share of the sends between stages that nothing hides.
        launch: host seconds to launch a block's forward pass: less than that it never takes.
        launch_tensor: more of it under tensor parallelism.
    """

    name: str
    weights: int = 2
    gradients: int = 4
    states: int = 12
    logits: float = 12.0
    later_logits: float = 0.0
    flash: bool = True
    dropout: bool = False
    keeps_gathered: float = 0.0
    balanced: bool = False
    shard: Shard = "none"
    recompute: Recompute = "none"
    sequence: bool = False
    fused: bool = True
    logit_traffic: float = 50.0
    sent_gradients: int = 2
    hidden: float = 0.05
    hidden_most: float = 0.13
    hidden_tensor: float = 0.0
    exposed_sends: float = 0.25
    launch: float = 3e-4
    launch_tensor: float = 1e-4


# Stoker trains float32 weights under 16-bit products (autocast, or FSDP2's mixed precision); its head and cross
# entropy run in chunks, so that no logits stand in memory.
STOKER = Software("stoker", weights=4, gradients=4, states=8, logits=0.0, sequence=True)
# Before 2022 there was neither fused attention nor sequence parallelism.
MEGATRON_2021 = Software(
    "megatron of 2021", gradients=2, dropout=True, flash=False, fused=False, launch=9.3e-4, launch_tensor=4e-5
)
MEGATRON = Software("megatron", shard="zero1", sequence=True)
NANOTRON = Software(
    "nanotron",
    gradients=6,
    logits=10.0,
    later_logits=4.0,
    keeps_gathered=0.15,
    balanced=True,
    sequence=True,
    launch=1.3e-3,
    launch_tensor=1.8e-4,
)
INTERNEVO = Software("internevo", gradients=2)
COMPOSER = Software("composer", weights=4, gradients=4, states=8)
TORCHTITAN = Software("torchtitan", weights=4, gradients=4, states=8, sequence=True)
BLOOM = replace(MEGATRON_2021, name="megatron-deepspeed", shard="zero1", gradients=4)
PEFT = Software("peft", weights=2, gradients=2, states=4, logits=4.0, recompute="full")
# What a row's source or framework says, and the software it means; the first that is found.
NAMES = (
    ("nanotron", NANOTRON), ("vtrain", MEGATRON_2021), ("sc21", MEGATRON_2021), ("korthikanti", MEGATRON_2021),
    ("dlperf", MEGATRON_2021), ("mt-nlg", MEGATRON_2021), ("bigscience", BLOOM), ("bloom", BLOOM),
    ("llm-foundry", COMPOSER), ("mosaic", COMPOSER), ("internevo", INTERNEVO), ("torchtitan", TORCHTITAN),
    ("torchtune", PEFT), ("peft", PEFT), ("megatron", MEGATRON), ("nemo", MEGATRON), ("simumax", MEGATRON),
    ("megascale", MEGATRON), ("fsdp", TORCHTITAN), ("stoker", STOKER),
)  # fmt: skip


def software_of(row: Mapping[str, Any]) -> Software:
    """The software of a row of measurements, by its ``framework`` or its ``source``; Megatron where neither tells."""
    for key in ("framework", "source"):
        said = str(row.get(key) or "").lower()
        for name, software in NAMES:
            if name in said:
                return software
    return MEGATRON
