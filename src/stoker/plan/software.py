"""What the software that trains does with memory and time: in which type it keeps what, what it overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.job.layout import Recompute, Shard


@dataclass(frozen=True)
class LateFrees:
    """Which inputs, gathered for split matrices on a stream of their own, are not freed in time to be used again.

    Measured on nanotron; why pipelines of two stages are spared is not known.

    Attributes:
        one, two, more: share of them without a pipeline, with two stages, with more.
        large: bytes of a split input from which on all are freed late, inside a node.
        most: tensor-parallel processes from which on a pipeline's are freed in time.
    """

    one: float
    two: float
    more: float
    large: float
    most: int

    def share(self, stages: int, tensor: int, size: float, *, per_node: int) -> float:
        """Of the inputs, those freed late."""
        if stages == 1:
            return self.one
        if stages == 2:
            return 1.0 if size >= self.large and tensor <= per_node else self.two
        return self.more if tensor < self.most else 0.0


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
        eager: whether it runs transformers' own code, operator by operator (`stoker.plan.eager`).
        fused_gate: whether the product of a gated MLP's nonlinearity with its gate is computed again, not kept.
        late: which of the inputs that sequence parallelism gathers for split matrices are freed late; None for none.
        unsummed: bytes of a gradient before it is added to the sum, of the head and the largest block.
        frozen: bytes of a weight that is not trained.
        seq_len: tokens of a row where nothing is said.
        first_stage: whether its logs tell of the first stage's memory.
        balanced: whether pipeline stages are cut by arithmetic, the head included, instead of by blocks.
        shard: what it shards where nothing is said.
        recompute: what it computes again where nothing is said.
        sequence: whether tensor parallelism splits the activations outside of the matrices, too.
        traffic: bytes that norms, residuals and nonlinearities move, to those that fused kernels do.
        logit_traffic: bytes read and written per logit.
        sent_gradients: bytes of a gradient on its way.
        hidden: share of the passes beside which gradients and weights can travel.
        hidden_most: of their time, the share that can be hidden at most.
        hidden_tensor: share of tensor parallelism's collectives that matrix products hide.
        hidden_experts: share of the exchanges with experts that other work hides.
        repeated_sums: share of a pipeline's micro-batches after which gradients are summed across nodes, where once a
            step would do: nanotron was seen to do it in about half of its runs.
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
    eager: bool = False
    fused_gate: bool = False
    late: LateFrees | None = None
    unsummed: int = 0
    frozen: int = 2
    seq_len: int = 2048
    first_stage: bool = False
    balanced: bool = False
    shard: Shard = "none"
    recompute: Recompute = "none"
    sequence: bool = False
    traffic: float = 1.14
    logit_traffic: float = 36.0
    sent_gradients: int = 2
    hidden: float = 0.18
    hidden_most: float = 0.68
    hidden_tensor: float = 0.0
    hidden_experts: float = 0.0
    repeated_sums: float = 0.0
    exposed_sends: float = 0.2
    launch: float = 3e-4
    launch_tensor: float = 1e-4


# Stoker trains float32 weights under 16-bit products (autocast, or FSDP2's mixed precision); its head and cross
# entropy run in chunks, so that no logits stand in memory. Its traffic and its launches are counted from the operators
# of eager code (`stoker.plan.measured`): 70 of 5 microseconds forward. They were not measured on a GPU.
STOKER = Software(
    "stoker", weights=4, gradients=4, states=8, logits=0.0, sequence=True, eager=True, traffic=2.6, launch=3.5e-4
)
# Before 2022 there was neither fused attention nor sequence parallelism.
MEGATRON_2021 = Software(
    "megatron of 2021",
    gradients=2,
    dropout=True,
    flash=False,
    traffic=0.54,
    launch=9.7e-4,
    launch_tensor=1.4e-5,
    hidden=0.19,
    hidden_most=0.53,
    exposed_sends=0.1,
)
MEGATRON = Software(
    "megatron",
    shard="zero1",
    sequence=True,
    logits=1.0,
    fused_gate=True,
    unsummed=2,
    traffic=1.84,
    launch=2.1e-4,
    hidden=0.41,
    hidden_most=0.75,
    hidden_tensor=0.68,
    hidden_experts=0.5,
    exposed_sends=0.2,
)
SIMUMAX = replace(MEGATRON, name="megatron without overlap", hidden_tensor=0.0, hidden_experts=0.0)
NANOTRON = Software(
    "nanotron",
    gradients=6,
    logits=7.1,
    later_logits=3.3,
    late=LateFrees(one=0.87, two=0.0, more=0.55, large=40e6, most=32),
    unsummed=2,
    first_stage=True,
    balanced=True,
    sequence=True,
    traffic=3.56,
    launch=1.18e-3,
    launch_tensor=3.4e-4,
    hidden=0.5,
    hidden_most=0.24,
    repeated_sums=0.5,
    exposed_sends=0.3,
)
# Its published memory is 28 to 33 bytes for each parameter that a process holds, sharded or split.
INTERNEVO = Software("internevo", gradients=2, states=28)
ONEFLOW = replace(MEGATRON_2021, name="oneflow", logits=5.0, hidden=0.8, hidden_most=0.9)
COMPOSER = Software("composer", weights=4, gradients=4, states=8)
# Its loss is compiled: logits and their gradient in 16 bits, and what the softmax keeps.
TORCHTITAN = Software("torchtitan", weights=4, gradients=4, states=8, sequence=True, logits=6.0)
# DeepSpeed's pipeline sends, and sums gradients, while nothing else is done.
BLOOM = replace(
    MEGATRON_2021,
    name="megatron-deepspeed",
    shard="zero1",
    gradients=4,
    hidden=0.0,
    hidden_most=0.0,
    exposed_sends=1.0,
)
DEEPSPEED = Software("deepspeed", gradients=2)
TORCHTUNE = Software("torchtune", gradients=2, states=4, logits=10.0, recompute="full")
PEFT = Software("peft", weights=4, gradients=4, states=8, logits=4.0, frozen=4, seq_len=512)
# What a row's source or framework says, and the software it means; the first that is found.
NAMES = (
    ("nanotron", NANOTRON), ("vtrain", MEGATRON_2021), ("sc21", MEGATRON_2021), ("korthikanti", MEGATRON_2021),
    ("oneflow/lang", ONEFLOW), ("dlperf", MEGATRON_2021), ("mt-nlg", BLOOM), ("bigscience", BLOOM), ("bloom", BLOOM),
    ("llm-foundry", COMPOSER), ("mosaic", COMPOSER), ("internevo", INTERNEVO), ("torchtitan", TORCHTITAN),
    ("torchtune", TORCHTUNE), ("peft", PEFT), ("megatron", MEGATRON), ("nemo", MEGATRON), ("simumax", SIMUMAX),
    ("megascale", MEGATRON), ("fsdp", TORCHTITAN), ("deepspeed", DEEPSPEED), ("zero paper", DEEPSPEED),
    ("stoker", STOKER),
)  # fmt: skip


def software_of(row: Mapping[str, Any]) -> Software:
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


def _named(row: Mapping[str, Any]) -> Software:
    for key in ("framework", "source"):
        said = str(row.get(key) or "").lower()
        for name, software in NAMES:
            if name in said:
                return software
    return MEGATRON
