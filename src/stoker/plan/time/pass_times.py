"""Seconds of a micro-batch's passes through blocks and the head: arithmetic, memory traffic, exchanges, launches."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from stoker.plan.block_dtypes import FLOAT, HALF
from stoker.plan.layer import RULE_CHUNK
from stoker.plan.matmul import STACKED
from stoker.plan.memory.stoker_memory import sent_types, types_of
from stoker.plan.param_placement import packed_of_block
from stoker.plan.pipeline.timeline import StageTime
from stoker.plan.setting import PACKED_BYTES, Setting
from stoker.plan.shape import Layer
from stoker.plan.software import COMPILED_LOGIT_VISITS, COMPILED_TRAFFIC, COMPILED_WIDE_TRAFFIC
from stoker.plan.time.block_collectives import block_collectives
from stoker.plan.time.calibrated_time import measured_passes
from stoker.plan.time.efficiency import Efficiency, efficiency_of, matmul_seconds
from stoker.plan.time.flop import attended_tokens

BACKWARD_ATTENTION = 2.5  # of the forward pass: five products for two (Dao, 2023, section 3.1)
SCORE_BYTES = 8  # read and written per score in a forward pass by fused scale, mask, softmax and dropout
BACKWARD_LAUNCH = 1.5  # of the forward pass' launch time
RECOMPUTED_PRODUCTS = 0.5  # of a block's products, with selective recomputation
# Bytes moved for a weight in 4 bits: bitsandbytes' kernels reach half of the bandwidth.
DEQUANTISED = 2 * (PACKED_BYTES["4bit"] + 2)
ATTENTION = ("qkv", "attention output")  # products that are split by heads
SMOOTH = 4.0  # exponent of the smooth maximum of host time and device time


def block_pass(setting: Setting, layer: Layer, efficiency: Efficiency) -> StageTime:
    """Returns the passes of one block and micro-batch, measured if possible, with the block's collectives."""
    exchanges = block_collectives(setting, layer, efficiency)
    measured = measured_passes(setting)
    if not measured:
        return _computed(setting, layer, efficiency, *exchanges)
    alone, (forward, backward) = measured.block_pass(setting, layer), exchanges
    if setting.layout.recompute == "full":
        backward += forward
    return StageTime(alone.forward + forward, alone.backward_input + backward, alone.backward_weight)


def _computed(
    setting: Setting, layer: Layer, efficiency: Efficiency, exchanges: float = 0.0, exchanges_back: float = 0.0
) -> StageTime:
    """Returns a device's computed passes, with its exposed collectives: the host also launches the next work during
    them.

    Args:
        exchanges, exchanges_back: seconds of collectives within the block, forward and backward.
    """
    shape, layout, work, software = setting.shape, setting.layout, setting.work, setting.software
    device, tensor, tokens = setting.cluster.device, layout.tensor, setting.tokens
    peak = device.peak(work.precision) * efficiency.matmul_share(work.precision)
    stacked = peak
    if software.memory is None and work.precision in ("fp8", "fp4"):  # Stoker's experts and routers stay in 16 bits
        stacked = device.peak("fp16") * efficiency.matmul
    heads = shape.kv_heads / ceil(shape.kv_heads / tensor)  # ways in which attention is split: heads stay whole
    products = 0.0
    for matmul in shape.matmuls(layer):
        split = 1 if matmul.split == "replicated" else heads if matmul.name in ATTENTION else tensor
        rows = tokens * matmul.uses / max(1, matmul.copies // setting.expert) if matmul.copies > 1 else tokens
        products += matmul_seconds(
            tokens * matmul.forward_flop / split,
            rows=max(rows, 1.0),
            inputs=matmul.inputs / (split if matmul.split == "row" else 1),
            outputs=matmul.outputs / (split if matmul.split == "column" else 1),
            peak=stacked if matmul.name in STACKED else peak,
            of=efficiency,
        )
    bandwidth = device.memory_gbs * 1e9
    seq = work.attended
    attention = 0.0
    if layer.attentions:
        flop = layer.attentions * 2 * (shape.query_width + shape.value_width) / heads * tokens
        reach = attended_tokens(seq, causal=software.flash, window=layer.window)
        attention = flop * reach / (device.peak("fp16") * efficiency.attention)
        if not software.flash:  # scores are written and read by scale, mask, softmax, dropout
            attention += tokens * shape.heads / tensor * seq * SCORE_BYTES / (bandwidth * efficiency.bandwidth)
    net = shape.delta_net if layer.linear else None
    if net is not None:  # as by the kernels of flash-linear-attention
        attention = tokens * net.forward_flop / tensor / (device.peak("fp16") * efficiency.attention)
    outside = shape.width * 8 / (tensor if layout.sequence else 1)
    width = shape.mlp_width if layer.feed_forward == "dense" else 0
    if layer.feed_forward == "experts" and shape.mixture is not None:
        mixture = shape.mixture
        width = mixture.per_token * (mixture.width + 2 * shape.width) + mixture.shared_width
    inside = (4 if shape.gated else 3) * width / tensor
    if net is not None:  # the convolution; the states; the gated norm
        inside += (2 * net.channels + 2 * net.state / RULE_CHUNK + 4 * net.value_width) / tensor
    elementwise = tokens * HALF * _traffic(setting) * (outside + inside) / (bandwidth * efficiency.bandwidth)
    unpacking = 0.0  # 4-bit weights are read, written in 16 bits, and read again, once in each pass
    if work.base != "none":
        held = packed_of_block(setting, layer).total
        unpacking = held * DEQUANTISED / (bandwidth * efficiency.bandwidth)
    launch = _launch(setting)
    forward = _longer(products + attention + elementwise + unpacking + exchanges, launch)
    inputs = products + BACKWARD_ATTENTION * attention + 2 * elementwise + unpacking + exchanges_back
    weights = products if work.tuning == "full" else 0.0
    slowed = _longer(inputs + weights, BACKWARD_LAUNCH * launch) / (inputs + weights)
    inputs, weights = inputs * slowed, weights * slowed
    if layout.recompute == "full":
        inputs += forward
    elif layout.recompute == "selective":
        again = 0.0 if setting.compiled else RECOMPUTED_PRODUCTS * (products + unpacking)
        inputs += attention if not software.flash else elementwise + again
    return StageTime(forward, inputs, weights)


def _traffic(setting: Setting) -> float:
    """Returns the bytes that operators other than products move, relative to fused kernels in 16 bits."""
    software = setting.software
    types = sent_types(setting)
    if setting.compiled:
        return COMPILED_WIDE_TRAFFIC if types.stream == FLOAT else COMPILED_TRAFFIC
    return software.wide_traffic if types.promoted == FLOAT else software.traffic


def _launch(setting: Setting) -> float:
    """Host seconds of a block's forward pass."""
    software, layout = setting.software, setting.layout
    launch = software.launch + software.launch_tensor * (layout.tensor > 1)
    if layout.tensor > 1 and layout.pipeline > 1 and setting.cluster.nodes > 1:
        least, each = software.launch_across
        launch = max(launch, least + each * layout.tensor)
    return launch


def _longer(device: float, host: float) -> float:
    """Seconds of work that the host launches while the device computes: the larger, rounded where they are near."""
    return float((device**SMOOTH + host**SMOOTH) ** (1 / SMOOTH))


def head_pass(setting: Setting, efficiency: Efficiency) -> StageTime:
    """Head and cross entropy, one micro-batch."""
    shape, layout, work = setting.shape, setting.layout, setting.work
    device, tokens = setting.cluster.device, setting.predicting
    matmul = shape.head_matmul()
    product = matmul_seconds(
        tokens * matmul.forward_flop / layout.tensor,
        rows=tokens,
        inputs=matmul.inputs,
        outputs=matmul.outputs / layout.tensor,
        peak=device.peak("fp16" if work.precision in ("fp8", "fp4") else work.precision) * efficiency.matmul,
        of=efficiency,
    )
    each = setting.software.logit_traffic
    if setting.compiled and layout.tensor == 1:
        each = COMPILED_LOGIT_VISITS * types_of(setting).product
    logits = tokens * shape.outputs / layout.tensor * each
    traffic = logits / (device.memory_gbs * 1e9 * efficiency.bandwidth)
    again = product if work.scores and work.trains_head else 0.0  # see `stoker.models.head_functions.Scores`
    return StageTime(product + traffic / 2, again + product + traffic / 2, product if work.trains_head else 0.0)


class Passes(NamedTuple):
    """Passes of a micro-batch through a block of each kind, and through the head."""

    blocks: dict[Layer, StageTime]
    head: StageTime


def passes_of(setting: Setting, efficiency: Efficiency) -> Passes:
    """Returns the passes of a micro-batch, measured if possible."""
    kinds = {layer for blocks in setting.blocks for layer in blocks}
    measured = measured_passes(setting)
    head = measured.head_pass(setting) if measured else head_pass(setting, efficiency)
    return Passes({layer: block_pass(setting, layer, efficiency) for layer in kinds}, head)


class PassTimes:
    """Passes through blocks and the head, each computed once for all settings that share it.

    The settings have the same work and the same cluster.
    """

    def __init__(self, efficiency: Efficiency | None = None) -> None:
        self.efficiency = efficiency
        self._passes: dict[tuple[object, ...], Passes] = {}

    def of(self, setting: Setting) -> Passes:
        """Returns the passes of a micro-batch."""
        layout = setting.layout
        key = (
            *(layout.tensor, layout.context, layout.context_by, layout.sequence, layout.recompute),
            *(setting.micro_batch, setting.expert, types_of(setting), setting.compiled),
        )
        if key not in self._passes:
            self._passes[key] = passes_of(setting, self.efficiency or efficiency_of(setting.cluster.device))
        return self._passes[key]

    def least(self, setting: Setting) -> float:
        """Returns a lower bound of a step's seconds with any sharding: only passes take time, and all stages are equal.

        Sharding decides in which types the passes compute.
        """
        layout = setting.layout
        either = {types_of(setting): setting}
        if layout.data * layout.context > 1:
            sharded = replace(setting, layout=replace(layout, shard="zero3", shard_size=layout.data))
            either.setdefault(types_of(sharded), sharded)
        return min(map(self.with_equal_stages, either.values()))

    def with_equal_stages(self, setting: Setting) -> float:
        """Returns the seconds of a step's passes if all stages took the same time."""
        correction = setting.cluster.correction(setting.work.precision, setting.work.tuning)
        factor = correction.compute if correction is not None else 1.0
        total = sum(time.total for time in self.stages(setting))
        return factor * total * setting.micro_batches / setting.layout.pipeline

    def stages(self, setting: Setting) -> tuple[StageTime, ...]:
        """Returns the time of one micro-batch in each stage of the pipeline, the head in the last."""
        kinds, head = self.of(setting)
        parts = [[(kinds[layer], count) for layer, count in blocks.items()] for blocks in setting.stage_blocks]
        parts[-1].append((head, 1))
        return tuple(
            StageTime(
                (1 + setting.work.reads) * sum(time.forward * count for time, count in stage),
                sum(time.backward_input * count for time, count in stage),
                sum(time.backward_weight * count for time, count in stage),
            )
            for stage in parts
        )
