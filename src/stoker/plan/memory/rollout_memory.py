"""Memory of a round of answers between steps: sampling with a cache of keys and values, and the passes that score them.

The gradients of the step before are freed. `stoker.generate` has the cache and the sampling, `stoker.train.rollouts`
the scoring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from stoker.hardware.measured.planner_correction import STATES
from stoker.plan.block_dtypes import FLOAT
from stoker.plan.eager_traits import code_of
from stoker.plan.memory.delta_net_activations import most_of_rule
from stoker.plan.memory.head_memory import CHUNK, CHUNK_GPU, scored_logits
from stoker.plan.memory.saved_activations import cast_weights
from stoker.plan.memory.stoker_memory import HELD, IDLE, REFERENCE, frozen_copies, types_of
from stoker.plan.param_placement import held_parameters, sharded, trained_parameters
from stoker.plan.setting import Setting
from stoker.plan.time.rollout_time import most_rows

SAMPLING, REWARDS, SCORING = "the sampling of answers", "the reward model's passes", "the scoring of answers"

# Of `stoker.generate`: tokens of a page, pages of the smallest pool, its growth, its share of free memory.
PAGE, SMALLEST, GROWTH, MOST_OF_FREE = 128, 64, 4, 0.8
SHARE_OF_CASTS = 0.25  # most of the memory for keys and values that copies of weights may take
STEP, SPARE = 64, 1.5  # columns of rows without pages are allocated in multiples, and in advance
PASS, PIECE = 2048, 512  # most tokens of prompts in a pass, and while others are answered
OF_REWARD = 8192  # tokens of a pass of the reward model
UPDATED = 3  # states of a layer with those that decay and those that are added
# Bytes of a float32 logit while tokens are drawn: its own, its probability, that in float64, and the sum up to it.
DRAWN = 24


def rollout_parts(
    setting: Setting, stage: int, training: Mapping[str, float], *, capacity: float
) -> Iterator[tuple[dict[str, float], str]]:
    """Yields (bytes by component, moment) of the parts of a round; nothing for tasks without.

    Args:
        training: components at the fullest moment of a step.
        capacity: bytes of a device that a program may allocate.
    """
    work, sizes = setting.work, setting.work.rollouts
    if sizes is None:
        return
    trained = FLOAT * sharded(setting, trained_parameters(setting, held_parameters(setting, stage), stage))
    states = {name: size for name, size in training.items() if name in (*HELD, *STATES)}
    # Between steps there are no gradients, unless processes sum them in buckets.
    states["gradients"] = trained if setting.layout.data > 1 and not setting.layout.zero else 0.0
    while_sampling = states
    if sizes.idle_on_host:
        while_sampling = {**states, "optimizer": 0.0, IDLE: states.get(IDLE, 0.0) + states.get("optimizer", 0.0)}
    held = sum(size for name, size in while_sampling.items() if name not in (REFERENCE, IDLE))
    yield {**while_sampling, **_sampling(setting, stage, max(0.0, capacity - held))}, SAMPLING
    if work.resident:
        rows = ceil(sizes.prompts / setting.layout.data) * sizes.answers
        tokens = min(OF_REWARD, rows * work.seq_len)
        copies = frozen_copies(setting)
        here = {"frozen copies": copies, IDLE: while_sampling[IDLE] - copies} if sizes.idle_on_host else {}
        yield {**while_sampling, **here, "activations": tokens * _most_of_block(setting, stage)}, REWARDS
    if not sizes.scored_in_training:
        yield {**states, **_reading(setting, stage, entropy=True)}, SCORING
    if sizes.reference:
        replaced = {"replaced weights": trained} if work.tuning == "full" else {}
        yield {**states, **replaced, **_reading(setting, stage, entropy=False)}, SCORING


def _sampling(setting: Setting, stage: int, free: float) -> dict[str, float]:
    """Returns the bytes of the cache, and beside it the most of a pass over prompts or of a step that adds a token to
    each row.
    """
    work, shape, types, cpu = setting.work, setting.shape, types_of(setting), setting.cluster.device.is_cpu
    sizes, tensor = work.rollouts, setting.layout.tensor
    assert sizes is not None
    asked = ceil(sizes.prompts / setting.layout.data) * sizes.answers
    rows = min(most_rows(setting), asked)
    prompt = ceil(work.prompt_tokens)
    together = max(1, min(PASS // prompt, ceil(rows / sizes.answers)))  # prompts of a pass
    layers = sum(layer.attentions * count for layer, count in setting.blocks[stage].items())
    width = 2 * shape.key_value_width if shape.latent is None else shape.query_width + shape.value_width
    numbers = layers * width / tensor  # of a token
    rotated = types.promoted if code_of(shape).rotary else types.product
    of_row = numbers * (rotated + types.product) / 2
    matrices = [m.inputs * max(m.modules) for layer in setting.blocks[stage] for m in shape.matmuls(layer)]
    cast = types.casts * types.product * max([shape.head_matmul().parameters, *matrices]) / tensor
    copies = 0.0 if cpu or setting.layout.zero or tensor > 1 else _cast_weights(setting, stage)
    copies = copies if copies <= SHARE_OF_CASTS * MOST_OF_FREE * free else 0.0
    if copies:  # nothing is cast in a step
        cast, free = 0.0, free - copies / MOST_OF_FREE
    low = types.product if types.product < FLOAT else 0
    step = rows * shape.outputs * (DRAWN + low)
    columns = _columns(prompt, prompt)
    prefill = together * columns * of_row + cast + min(PASS, together * prompt) * _most_of_block(setting, stage)
    later = max(step, cast, prefill * PIECE / PASS if asked > rows else 0.0)
    if cpu or setting.layout.zero or not code_of(shape).packed or shape.delta_net is not None:
        cache = _power_of_two(rows) * _columns(prompt, prompt + sizes.tokens) * of_row
        states, updated = _states(setting, stage, rows)
        return {"keys and values": cache + states, "sampling": copies + max(later, prefill, updated)}
    of_page = PAGE * numbers * types.product
    pages, before = _pool(1 + rows * ceil((prompt + sizes.tokens) / PAGE), int(MOST_OF_FREE * free / of_page))
    moved = before / max(1, layers) * of_page  # one layer at a time is in the old pool and in a larger one
    # The first step is computed with rows of as many columns as well.
    first = min(rows, together * sizes.answers)
    of_first, _ = _pool(1 + first * ceil((prompt + 1) / PAGE), pages)
    beside = max(prefill, of_page / PAGE * (of_first * PAGE + _power_of_two(first) * columns))
    cache = pages * of_page
    return {"keys and values": cache, "sampling": copies + max(later, moved, beside - cache)}


def _cast_weights(setting: Setting, stage: int) -> float:
    """Returns the bytes of the copies of weights in the type of products (`stoker.models.cast_weights`)."""
    shape, types = setting.shape, types_of(setting)
    blocks = sum(cast_weights(shape, layer, types=types) * count for layer, count in setting.blocks[stage].items())
    return blocks + types.casts * types.product * shape.head_matmul().parameters


def _states(setting: Setting, stage: int, rows: int) -> tuple[float, float]:
    """Returns the bytes of the states of linear attention, which do not grow with the answers, and of one layer's
    states while a token updates them.
    """
    net, tensor = setting.shape.delta_net, setting.layout.tensor
    if net is None:
        return 0.0, 0.0
    layers = sum(count for layer, count in setting.blocks[stage].items() if layer.linear)
    state = FLOAT * net.state / tensor
    convolution = types_of(setting).product * net.channels * net.kernel / tensor
    return _power_of_two(rows) * layers * (state + convolution), rows * UPDATED * state


def _pool(needed: int, largest: int) -> tuple[int, int]:
    """Returns (pages of the pool that holds these pages, pages before it grew to that)."""
    pages = before = 0
    while pages < min(needed, largest):
        grown = max(SMALLEST, GROWTH * pages)
        pages, before = grown if grown <= largest else max(largest, pages + SMALLEST), pages
    return pages, before


def _columns(first: int, tokens: int) -> int:
    """Returns the columns that are allocated for rows of this length, which have begun with ``first`` tokens."""
    columns = _in_steps(SPARE * first)
    while columns < tokens:
        columns = _in_steps(SPARE * (columns + 1))
    return columns


def _in_steps(columns: float) -> int:
    return -(-int(columns) // STEP) * STEP


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _reading(setting: Setting, stage: int, *, entropy: bool) -> dict[str, float]:
    """Returns the bytes of a pass that reads the log-probability of each target, with the type of products' copies of
    the weights, which autocast keeps.
    """
    shape, layout, types = setting.shape, setting.layout, types_of(setting)
    chunk = CHUNK if setting.cluster.device.is_cpu else CHUNK_GPU
    outputs = shape.outputs / layout.tensor
    at_once = min(float(chunk), FLOAT * setting.predicting * outputs)
    logits = scored_logits(at_once, types, entropy=entropy, compiled=setting.compiled and layout.tensor == 1)
    cast = types.casts * types.product * shape.head_matmul().parameters / layout.tensor
    head = logits + cast + setting.predicting * shape.width * (types.promoted + types.product)
    casts = types.casts * sum(
        count * cast_weights(shape, layer, types=types, tensor=layout.tensor)
        for layer, count in setting.blocks[stage].items()
    )
    block = setting.tokens * _most_of_block(setting, stage)
    return {"activations": casts + (block if block > head else 0.0), "head": head if block <= head else 0.0}


def _most_of_block(setting: Setting, stage: int) -> float:
    """Returns the most bytes a token of a block's pass without gradients: hidden states, and those of a norm in
    float32, the input and the tensors of the MLP, or those of linear attention.
    """
    shape, types = setting.shape, types_of(setting)
    tensors = 3 if shape.gated else 2
    most = 0.0
    for layer in setting.blocks[stage]:
        width = float(shape.mlp_width if layer.feed_forward == "dense" else 0)
        if layer.feed_forward == "experts" and shape.mixture is not None:
            width = shape.mixture.per_token * (shape.mixture.width + shape.width / tensors)
        most = max(most, types.product * (tensors * width / setting.layout.tensor + shape.width))
        if layer.linear and shape.delta_net is not None:
            inside = most_of_rule(shape.delta_net, types.product, processor=setting.cluster.device.is_cpu)
            most = max(most, inside / setting.layout.tensor + types.product * shape.width)
    return types.stream * shape.width + max(most, 2 * FLOAT * shape.width)
