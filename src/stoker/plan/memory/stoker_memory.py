"""Memory of a device under Stoker: the live tensors at each moment of a step.

On a CPU it is the largest resident size of a process, with the interpreter and its libraries, and with the memory that
the C library's allocator does not return.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from stoker.hardware.measured.planner_correction import STATES
from stoker.plan.block_dtypes import FLOAT, HALF, BlockDtypes, block_dtypes
from stoker.plan.memory.head_memory import CHUNK, CHUNK_GPU, HeadBytes, head_bytes
from stoker.plan.memory.muon_memory import muon_bytes
from stoker.plan.memory.saved_activations import EagerBlock, cast_weights, final_norm, row_bytes
from stoker.plan.param_placement import (
    ParamPlacement,
    block_parameters,
    held_parameters,
    packed_matmuls,
    packed_of_block,
    packed_parameters,
    sharded,
    trained_parameters,
    trained_whole,
)
from stoker.plan.setting import CUT, PACKED_BYTES, Setting
from stoker.plan.trainable_params import end_elements

# Python, PyTorch for CPUs, transformers, peft, the tokenizer and the data's index: 0.37 to 0.40 GiB with PyTorch 2.13
# and transformers 5.23 before a model is loaded, 0.40 to 0.41 in a step beside the live tensors; 0.46 with LoRA.
PROCESS = 0.41 * 2**30
# glibc serves blocks of up to 32 MiB from its heap, which fragments between tensors that live for a step and tensors
# that live for a pass. Measured as the peak above that with MALLOC_MMAP_THRESHOLD_=131072, which equals the live bytes
# (to 1 %).
SPLIT = 0.42  # of activations and gradients
SPLIT_AGAIN = 2.5  # of the block computed again, which is allocated between gradients that stay

# cuBLAS from Hopper on, for the threads of the forward and the backward passes: torch's default.
OF_STREAM = 32 * 2**20
WORKSPACES = 2 * OF_STREAM
BLOCKS_HERE = 2  # whose activations are on the device while others are offloaded

REFERENCE, IDLE = "reference on the host", "idle on the host"
# Parts that outlast a model's passes.
HELD = (*(name for name in STATES if name not in ("process", "workspaces")), "gathered weights", REFERENCE, IDLE)

# The moments at which a process may hold most.
HEAD = "the last micro-batch's loss"
NORM = "the backward pass of the last norm"
BACKWARD = "the start of the backward pass"
FIRST_BLOCK = "the backward pass of the first block"
END = "the end of the backward pass"
STEP = "the optimizer's step"


def eager_parts(setting: Setting, stage: int) -> tuple[dict[str, float], str]:
    """Returns (bytes by component, moment of the step) at the peak of a process of the pipeline."""
    work, layout, shape = setting.work, setting.layout, setting.shape
    held = held_parameters(setting, stage)
    trained = trained_parameters(setting, held, stage)
    types, stepped = types_of(setting), sharded(setting, trained)
    gradients = summed = stepped * FLOAT
    if setting.micro_batches > 1 and (layout.zero == 1 or (layout.zero and layout.pipeline > 1)):
        summed = trained.total * FLOAT  # whole ones, until the last micro-batch's are scattered with them
    kept, on_host, again, of_block, waiting, of_first = stage_activations(setting, stage)
    norm_saved, norm_most = _final_norm(setting, stage)
    head = _head(setting, stage, types)
    tied = head.scaled if shape.tied and work.trains_head else 0.0
    earlier = summed if setting.micro_batches > 1 else 0.0
    first_left = max(earlier, summed - _last_gradients(setting, stage))
    unpacked = _unpacked(setting, stage, types)
    moments = {  # activations, head, gradients, unpacked weights, updates
        HEAD: (waiting + norm_saved, head.forward, earlier, 0.0, 0.0),
        NORM: (waiting + norm_most, head.backward, earlier, 0.0, 0.0),
        BACKWARD: (kept + again + of_block, head.backward, earlier, unpacked, 0.0),
        FIRST_BLOCK: (of_first, head.kept, first_left, unpacked, 0.0),
        END: (0.0, head.kept + tied, summed, 0.0, 0.0),
        STEP: (0.0, 0.0, gradients, 0.0, muon_bytes(setting, stage)),
    }
    fullest = max(moments, key=lambda name: sum(moments[name]))
    of_activations, of_head, of_gradients, of_unpacked, of_updates = moments[fullest]
    parts = {
        "weights": _weights(setting, stage, held, trained),
        "gradients": of_gradients,
        "optimizer": stepped * setting.software.states,
        "outer step": stepped * setting.software.outer,
        "activations": of_activations,
        "head": of_head,
        "gathered weights": _gathered(setting, stage),
        "unpacked weights": of_unpacked,
        "updates": of_updates,
        "host copies": 2 * FLOAT * stepped if layout.offload == "optimizer" else 0.0,  # weights and gradients
        "activations on the host": on_host,
        "compression error": stepped * FLOAT if layout.compress == "powersgd" else 0.0,
    }
    if setting.cluster.device.is_cpu:
        parts |= {"process": PROCESS, "split heap": SPLIT * (kept + on_host + gradients) + SPLIT_AGAIN * again}
    if "fp8" in setting.cluster.device.peak_tflops:
        parts["workspaces"] = WORKSPACES + (OF_STREAM if records_graphs(setting) else 0)
    idle = work.rollouts is not None and work.rollouts.idle_on_host
    parts[IDLE if idle else "frozen copies"] = frozen_copies(setting)
    if work.tuning == "full" and work.rollouts is not None and work.rollouts.reference:
        parts[REFERENCE] = stepped * FLOAT
    if work.critic is not None:
        parts["gradients"] = max(parts["gradients"], gradients)  # they wait while the critic is trained
        other, _ = eager_parts(replace(setting, work=work.critic), stage)
        parts = {name: _beside(name, parts.get(name, 0.0), other.get(name, 0.0)) for name in {**parts, **other}}
    return {name: size for name, size in parts.items() if size}, fullest


def frozen_copies(setting: Setting) -> float:
    """Returns the bytes of the frozen models that each process holds whole under any layout, counted as tuned like the
    trained one: weights that were trained are float32.
    """
    work = setting.work
    return work.resident * setting.shape.parameters * (FLOAT if work.tuning == "full" else types_of(setting).product)


def records_graphs(setting: Setting) -> bool:
    """Returns whether decoding steps are recorded as CUDA graphs, on a stream with a workspace of its own (see
    `stoker.generate.decode_graphs.recorder_of`).
    """
    work, layout = setting.work, setting.layout
    alone = not layout.zero and layout.tensor == 1 and not setting.cluster.device.is_cpu
    return work.rollouts is not None and alone and work.base == "none" and not types_of(setting).casts


def _last_gradients(setting: Setting, stage: int) -> float:
    """Returns the bytes of gradients that a pass has not yet computed when it enters the first block."""
    work, shape, tensor = setting.work, setting.shape, setting.layout.tensor
    if work.tuning != "full":  # those of adapters are small
        return 0.0
    blocks = (block_parameters(shape, layer, tensor=tensor, expert=setting.expert) for layer in setting.blocks[stage])
    size = min((sharded(setting, block) for block in blocks), default=0.0)
    if stage == 0 and not shape.tied:  # a tied head has given the embedding's gradient before
        size += sharded(setting, ParamPlacement(shape.embedding_parameters / tensor))
    return size * FLOAT


def _weights(setting: Setting, stage: int, held: ParamPlacement, trained: ParamPlacement) -> float:
    """Returns the bytes of the weights: float32 ones, or a frozen base, packed or in the type of products."""
    work, layout = setting.work, setting.layout
    if work.tuning == "full":
        return sharded(setting, held) * FLOAT
    packed = packed_parameters(setting, stage)
    cut = layout.sharers if layout.zero == 3 and work.base in CUT else 1
    frozen = ParamPlacement(held.dense - packed.dense - trained_whole(setting, stage), held.experts - packed.experts)
    return packed.total / cut * PACKED_BYTES.get(work.base, 0.0) + (
        sharded(setting, frozen) * types_of(setting).product + sharded(setting, trained) * FLOAT
    )


def _beside(name: str, own: float, other: float) -> float:
    """Combines the bytes of two models that are trained one after another: states add up, temporaries do not."""
    return own + other if name in HELD else max(own, other)


class StageActivations(NamedTuple):
    """Bytes that a process of the pipeline saves for the backward pass.

    Attributes:
        here: of all micro-batches in flight, on the device.
        on_host: those of them that are offloaded.
        again: of the one block that is recomputed.
        gradients: of one block's hidden states and activations, in its backward pass.
        before: the same as ``here`` before the backward pass, which fetches what was offloaded.
        first: of one block of one micro-batch in its backward pass, when those of all others are freed.
    """

    here: float
    on_host: float
    again: float
    gradients: float
    before: float
    first: float


def stage_activations(setting: Setting, stage: int) -> StageActivations:
    """Returns the activations of a process of the pipeline, for Stoker on any device."""
    work, layout, shape, types = setting.work, setting.layout, setting.shape, types_of(setting)
    gathered = layout.context if layout.context_by == "gather" else 1
    rows = setting.micro_batch * work.rows
    float8 = work.precision == "fp8"
    casts_again = float8 or (setting.compiled and layout.recompute == "selective")
    kept = largest = again = of_weights = gradients = first = unread = 0.0
    for layer, count in setting.blocks[stage].items():
        block = EagerBlock(
            shape,
            layer,
            seq_len=work.attended,
            types=types,
            tensor=layout.tensor,
            sequence=layout.sequence,
            gathered=gathered,
            rows=rows,
            processor=setting.cluster.device.is_cpu,
            whole_rows=setting.cluster.device.has_flash and layout.context == 1,
            compiled=setting.compiled,
            float8=float8,
        )
        own, alone = block.saved(layout.recompute)
        kept += own * count
        largest = max(largest, own)
        again = max(again, alone)
        gradients = max(gradients, block.gradients())
        casts = 0.0
        if work.tuning == "full" and not casts_again:
            casts = cast_weights(shape, layer, types=types, tensor=layout.tensor)
        of_weights += count * casts
        first = max(first, setting.tokens * (own + alone + block.gradients()) + casts)
        if layer == shape.layer(0):
            unread = block.norms_of_input()
    # Nothing before the first block is trained, so its input has no gradient.
    frozen = stage == 0 and work.low_rank > 0 and not end_elements(shape, work.adapters)[0]
    if frozen and not setting.compiled and layout.recompute == layout.offload == "none":
        kept -= unread
    on_host, before = 0.0, kept
    if layout.offload == "activations":  # of all blocks but the last
        on_host, before = kept - largest, largest
        kept = min(kept, BLOCKS_HERE * largest)
    of_rows = 0.0
    if setting.cluster.device.is_cpu:  # a GPU's kernel needs no mask
        of_rows = row_bytes(
            shape, seq_len=work.attended, types=types, tensor=layout.tensor, gathered=gathered, rows=rows
        )
    # The keys and values of a prefix, before those of each row.
    prefix = 2 * shape.key_value_width * types.product * work.adapters.prefix * setting.micro_batch
    of_weights += prefix * sum(setting.blocks[stage].values())
    flying = setting.in_flight(stage) * setting.tokens
    return StageActivations(
        here=flying * (kept + of_rows) + of_weights,
        on_host=flying * on_host,
        again=setting.tokens * again,
        gradients=setting.tokens * gradients,
        before=flying * (before + of_rows) + of_weights,
        first=first,
    )


def _final_norm(setting: Setting, stage: int) -> tuple[float, float]:
    """Returns the bytes of the norm before the head: saved, and the most in its backward pass."""
    if stage != setting.last:
        return 0.0, 0.0
    tokens = setting.tokens / (setting.layout.tensor if setting.layout.sequence else 1)
    saved, most = final_norm(setting.shape, types=types_of(setting), processor=setting.cluster.device.is_cpu)
    return tokens * saved, tokens * most


def _head(setting: Setting, stage: int, types: BlockDtypes) -> HeadBytes:
    if stage != setting.last:
        return HeadBytes(0.0, 0.0, 0.0)
    work, layout = setting.work, setting.layout
    trained = work.trains_head
    # Beside a frozen base a trained head is in float32, unless it is gathered in 16 bits.
    wide = trained and work.tuning != "full" and (not layout.zero or layout.offload == "params")
    chunk = CHUNK if setting.cluster.device.is_cpu else CHUNK_GPU
    return head_bytes(
        setting.shape,
        setting.predicting,
        types=types,
        trained=trained,
        wide=wide,
        tensor=layout.tensor,
        chunk=chunk,
        compiled=setting.compiled and layout.tensor == 1,
        scores=work.scores,
        entropy=work.rollouts is not None and work.rollouts.scored_in_training,
    )


def types_of(setting: Setting) -> BlockDtypes:
    """Returns the dtypes in which a setting's blocks compute; parameters on the host are fetched in float32."""
    work, layout = setting.work, setting.layout
    return block_dtypes(
        work.precision,
        held="16-bit" if layout.zero and layout.offload != "params" else "fp32",
        rank=work.low_rank,
        frozen=work.tuning != "full",
    )


def sent_types(setting: Setting) -> BlockDtypes:
    """Returns the dtypes in which processes send hidden states and results of products."""
    return types_of(setting) if setting.software.memory is None else BlockDtypes(HALF, HALF, casts=False)


def weight_bytes(setting: Setting) -> int:
    """Returns bytes of a weight that is gathered from its shards: 4 if the host keeps them, and does not cast."""
    if setting.software.memory is not None:
        return HALF
    whole = setting.layout.offload == "params" and setting.work.tuning == "full"
    return FLOAT if whole else types_of(setting).product


def _unpacked(setting: Setting, stage: int, types: BlockDtypes) -> float:
    """Returns the largest matrix of a quantised base, or all experts', while it is multiplied with: unpacked, one at a
    time.
    """
    if setting.work.base == "none":
        return 0.0
    fused = replace(setting, work=replace(setting.work, shape=replace(setting.shape, splits_fused=False)))
    matmuls = (m for layer in setting.blocks[stage] for m in packed_matmuls(fused, layer))
    return types.product * max((m.inputs * m.copies * max(m.modules) for m in matmuls), default=0.0)


def _gathered(setting: Setting, stage: int) -> float:
    """Returns the bytes of gathered weights: all under ZeRO-1 and 2; under ZeRO-3 the outermost ones, those of a block,
    and of the blocks gathered ahead.

    All are gathered in a pipeline too: torch's stages free none before the last micro-batch's backward pass. With
    parameters on the host, layers that are trained in full beside a frozen base are gathered in float32.
    """
    layout, shape = setting.layout, setting.shape
    if not layout.zero:
        return 0.0
    held = held_parameters(setting, stage)
    size = weight_bytes(setting)
    wider = FLOAT - size if layout.offload == "params" else 0
    if layout.zero < 3 or layout.pipeline > 1:
        return (held.total - packed_parameters(setting, stage).total) * size + wider * trained_whole(setting, stage)
    # Blocks of a quantised base gather packed weights, or none.
    packed = PACKED_BYTES.get(setting.work.base, 0.0) / size if setting.work.base in CUT else 0.0
    blocks = [
        block_parameters(shape, layer, tensor=layout.tensor, expert=setting.expert).total
        - (1 - packed) * packed_of_block(setting, layer).total
        for layer in setting.blocks[stage]
    ]
    into, head = end_elements(shape, setting.work.adapters)
    outside = max(
        size * shape.embedding_parameters + wider * into, size * shape.head_matmul().parameters + wider * head
    )
    return size * (1 + layout.prefetch) * max(blocks, default=0.0) + outside / layout.tensor
