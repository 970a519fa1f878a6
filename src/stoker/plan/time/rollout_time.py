"""Seconds of a round of answers: prefill of the prompts, decoding, and passes that score the answers.

A decoding step adds a token to every row. Each weight is read once a step, and so are the keys and values, or the
states of linear attention, of every row (Pope et al., 2022, section 2), so that a step of few rows is bound by the
memory's bandwidth; with many rows it is bound by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from stoker.plan.block_dtypes import FLOAT, HALF
from stoker.plan.memory.stoker_memory import types_of, weight_bytes
from stoker.plan.setting import PACKED_BYTES, Setting
from stoker.plan.time.efficiency import Efficiency, efficiency_of
from stoker.plan.time.network_cost import CollectiveGroup, collective_seconds
from stoker.plan.time.pass_times import passes_of

ROWS, ROWS_GPU = 64, 256  # answers in a step of `stoker.generate.generation_engine`
CAST = 2 * HALF  # bytes of a weight in float32 that is cast for a product: written, and read again
# Passes over the states of linear attention for a token: a kernel reads and writes them, and they are copied into the
# cache; in PyTorch each operator reads and writes them.
STATE, STATE_CPU = 4, 16
# Bytes of a logit from the head to the token: the total, the probabilities, and their sum over tokens in float64.
LOGIT = 44


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of a round of answers on one device.

    Attributes:
        prefill: of the prompts.
        decode: of the answers' tokens, if all have the most tokens.
        scoring: of the passes over answers before a step.
        steps: optimizer steps on the round, of the setting's batch.
    """

    prefill: float
    decode: float
    scoring: float
    steps: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.scoring

    @property
    def of_step(self) -> float:
        """A step's share."""
        return self.total / self.steps


def rollouts_of(setting: Setting, efficiency: Efficiency | None = None) -> RolloutTime | None:
    """Returns the time of a round of answers; None for tasks without."""
    sizes = setting.work.rollouts
    if sizes is None:
        return None
    efficiency = efficiency or efficiency_of(setting.cluster.device)
    prompts = ceil(sizes.prompts / setting.layout.data)
    rows = prompts * sizes.answers
    waves = ceil(rows / most_rows(setting))
    at_once, prompt = ceil(rows / waves), setting.work.prompt_tokens
    each = _decoding(setting, at_once, efficiency, attended=prompt + sizes.tokens / 2)
    scored = ceil(rows / setting.micro_batch) * _forward_seconds(_alone(setting), efficiency)
    return RolloutTime(
        prefill=_forward_seconds(_of_rows(setting, prompts, prompt), efficiency),
        decode=waves * sizes.tokens * each,
        scoring=sizes.readings * scored,
        steps=sizes.prompts * sizes.answers * sizes.epochs / setting.work.global_batch,
    )


def most_rows(setting: Setting) -> int:
    """Returns the most answers in a step of decoding."""
    return ROWS if setting.cluster.device.is_cpu else ROWS_GPU


def _alone(setting: Setting) -> Setting:
    """Returns the setting of the policy's passes alone, without gradients."""
    work = replace(setting.work, rollouts=None, critic=None, reads=0)
    return replace(setting, work=work, layout=replace(setting.layout, recompute="none"))


def _of_rows(setting: Setting, rows: int, tokens: float) -> Setting:
    alone = _alone(setting)
    work = replace(alone.work, seq_len=max(1, round(tokens)), computed=tokens, predicted=1.0)
    return replace(alone, work=work, micro_batch=rows)


def _forward_seconds(setting: Setting, efficiency: Efficiency) -> float:
    """Returns the seconds of a micro-batch's forward pass through all blocks."""
    kinds = passes_of(setting, efficiency).blocks
    return sum(kinds[layer].forward * count for blocks in setting.stage_blocks for layer, count in blocks.items())


def _decoding(setting: Setting, rows: int, efficiency: Efficiency, *, attended: float) -> float:
    """Returns the seconds of a step that adds a token to each row.

    Args:
        attended: tokens that each row attends to.
    """
    shape, layout, device, work = setting.shape, setting.layout, setting.cluster.device, setting.work
    bandwidth = device.memory_gbs * 1e9 * efficiency.bandwidth
    kinds = passes_of(_of_rows(setting, rows, 1.0), efficiency).blocks
    weight, number = _weight_bytes(setting), types_of(setting).product
    computed = 0.0
    for blocks in setting.stage_blocks:
        for layer, count in blocks.items():
            read = sum(m.held * min(m.copies, m.uses * rows) for m in shape.matmuls(layer)) / layout.tensor
            kept = layer.attentions * 2 * shape.key_value_width * number * rows * attended / layout.tensor
            if layer.linear and shape.delta_net is not None:
                passes = STATE_CPU if device.is_cpu else STATE
                kept = passes * shape.delta_net.state * FLOAT * rows / layout.tensor
            computed += count * (max(kinds[layer].forward, read * weight / bandwidth) + kept / bandwidth)
    head = shape.head_matmul()
    peak = device.peak("fp16" if work.precision in ("fp8", "fp4") else work.precision) * efficiency.matmul
    arithmetic = rows * head.forward_flop / layout.tensor / peak
    computed += max(arithmetic, head.held * weight / layout.tensor / bandwidth)
    computed += rows * shape.outputs * LOGIT / bandwidth
    if layout.zero < 3:
        return computed
    group = CollectiveGroup(layout.sharers, layout.tensor)
    gathered = shape.parameters / layout.tensor * weight_bytes(setting)
    return computed + collective_seconds(
        "all-gather", gathered, group, setting.cluster, efficiency, calls=1 + shape.layers
    )


def _weight_bytes(setting: Setting) -> float:
    """Returns the bytes that move for each weight of a product."""
    work, types = setting.work, types_of(setting)
    if work.base != "none":  # unpacked for each product
        return PACKED_BYTES[work.base] + 2 * types.product
    return FLOAT + CAST if types.casts and work.tuning == "full" else types.product
