"""What a layout moves in one optimizer step: closed forms by axis and kind of collective.

Sources: Rajbhandari et al., 2020 (ZeRO), section 7; Shoeybi et al., 2019 (Megatron-LM), section 3; Narayanan
et al., 2021 (pipelines), section 3.2; Korthikanti et al., 2022 (sequence parallelism), section 4.2.2; Jacobs
et al., 2023 (Ulysses), section 3.2. All sizes are those of whole tensors, see `volume`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from volume import Flow, Volume, Volumes, added

from stoker.job.layout import Layout

INTEGER, DOUBLE = 8, 8  # bytes


@dataclass(frozen=True)
class Held:
    """A parameter as a process holds it: split by tensor parallelism, not yet sharded.

    Attributes:
        trained: whether it has a gradient.
        partial: whether that gradient is to be summed over the tensor processes.
    """

    shape: tuple[int, ...]
    trained: bool = True
    partial: bool = False

    @property
    def elements(self) -> int:
        """How many numbers."""
        return prod(self.shape)

    def shard(self, processes: int) -> int:
        """Elements of the largest shard of it over a number of processes."""
        return self.padded(processes) // processes

    def padded(self, processes: int) -> int:
        """Elements when its first dimension is padded to a multiple of the processes that share it."""
        return -(-self.shape[0] // processes) * processes * prod(self.shape[1:])


@dataclass(frozen=True)
class ModelShape:
    """The part of a model that one process holds: all of it, or the blocks of its pipeline stages.

    Attributes:
        blocks: the parameters of each block.
        outside: all other parameters of each of its stages (there is one without a pipeline).
        width: of the hidden states.
        query_width, key_value_width: a token's queries, and its keys (or values), as the process computes them.
        regions: sums over the tensor processes in a block: attention and MLP.
        embeds, heads: whether embedding and head are here.
        input_gradient: whether the first block's input has a gradient: not behind a frozen embedding.
        boundaries: between its pipeline stages and those of other processes.
        tied: elements that this process has of an embedding whose copy, the head, another stage has.
    """

    blocks: tuple[tuple[Held, ...], ...]
    outside: tuple[tuple[Held, ...], ...]
    width: int
    query_width: int
    key_value_width: int
    regions: int = 2
    embeds: bool = True
    heads: bool = True
    input_gradient: bool = True
    boundaries: int = 0
    tied: int = 0

    @property
    def parameters(self) -> tuple[Held, ...]:
        """All that this process holds."""
        return tuple(held for group in (*self.blocks, *self.outside) for held in group)


@dataclass(frozen=True)
class StepShape:
    """The work of one process in one optimizer step.

    Attributes:
        tokens: of each micro-batch: this process' part of the row under context parallelism, padding included.
        targets: positions of each micro-batch that this process predicts from.
        chunks: pieces in which each micro-batch's cross entropy is computed.
        activation, weight, gradient, loss: bytes of an element of hidden states, of gathered weights, of summed
            gradients, and of logits where the loss is computed.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    chunks: tuple[int, ...]
    activation: int = 4
    weight: int = 4
    gradient: int = 4
    loss: int = 4

    @property
    def micro_batches(self) -> int:
        """Forward passes of the step."""
        return len(self.tokens)


def communication(layout: Layout, model: ModelShape, step: StepShape) -> Volumes:
    """Everything that one process moves in one optimizer step."""
    return added(
        data_parallel(layout, model, step),
        _tensor(layout, model, step),
        _context(layout, model, step),
        _pipe(layout, model, step),
        _once(layout, model, step),
    )


def data_parallel(layout: Layout, model: ModelShape, step: StepShape) -> Volumes:
    """Weights and gradients between processes that compute with the same weights.

    X being the bytes of the weights: DDP sums X once. ZeRO-1 scatters the sum once, and gathers the weights once for
    all micro-batches; ZeRO-2 scatters after every micro-batch; ZeRO-3 gathers before every forward and every backward
    pass: 3X a micro-batch. What lies outside of the blocks is one group, kept from the forward to the backward pass.
    A pipeline's schedules scatter once a step, and let weights go after forward passes only, so that they are gathered
    again, once for each of those.
    """
    same = layout.data * layout.context
    trained = [p for p in model.parameters if p.trained]
    if same == 1:
        return {}
    if layout.shard == "none":
        return {Flow("batch", "all-reduce"): Volume(1, sum(p.elements for p in trained) * step.gradient)}
    sharers = layout.sharers
    blocks, outside = _gathered(model.blocks, sharers, step), _gathered(model.outside, sharers, step)
    once = layout.shard == "zero1" or layout.pipeline > 1
    reductions = 1 if once else step.micro_batches
    for_blocks, for_outside = 1, 1
    if layout.shard == "zero3":
        passes = step.micro_batches
        for_blocks, for_outside = (passes + 1, 1) if layout.pipeline > 1 else (2 * passes, passes)
    scattered = Volume(
        sum(any(p.trained for p in group) for group in (*model.blocks, *model.outside)),
        sum(p.padded(sharers) for p in trained) * step.gradient,
    )
    moved = {
        Flow("shard", "all-gather"): blocks * for_blocks + outside * for_outside,
        Flow("shard", "reduce-scatter"): scattered * reductions,
    }
    if layout.replicas > 1:  # parts are summed up here first, and over the replicas once
        moved[Flow("replica", "all-reduce")] = Volume(scattered.calls, scattered.size // sharers)
    return moved


def _gathered(groups: tuple[tuple[Held, ...], ...], sharers: int, step: StepShape) -> Volume:
    """One all-gather for each group."""
    return Volume(sum(map(bool, groups)), sum(p.padded(sharers) for group in groups for p in group) * step.weight)


def _tensor(layout: Layout, model: ModelShape, step: StepShape) -> Volumes:
    """Activations between the processes that split each matrix.

    A region's input is copied to all and its outputs are summed: one all-reduce forward, and one backward for the
    gradient of the input. With sequence parallelism each is an all-gather or a reduce-scatter of the same tensor, and
    the backward pass of the one is the other.
    """
    if layout.tensor == 1:
        return {}
    blocks = len(model.blocks)
    entries = exits = model.regions * blocks
    again_entries, again_exits = _repeated(layout, model)
    hidden = Volume(step.micro_batches, sum(step.tokens) * model.width * step.activation)
    frozen = model.embeds and not model.input_gradient  # then nothing goes back before the first block
    entries, exits = entries + model.heads, exits + model.embeds
    backward_entries, backward_exits = entries - frozen, exits - frozen
    if layout.sequence:
        moved = {
            Flow("tensor", "all-gather"): hidden * (entries + again_entries + backward_exits),
            Flow("tensor", "reduce-scatter"): hidden * (exits + again_exits + backward_entries),
        }
    else:
        moved = {Flow("tensor", "all-reduce"): hidden * (exits + again_exits + backward_entries)}
    return added(moved, _cross_entropy(model, step))


def _repeated(layout: Layout, model: ModelShape) -> tuple[int, int]:
    """(entries, exits) of regions that recompute runs again. It stops once it has what the backward pass needs,
    before the last sum of a block."""
    if layout.recompute != "full":
        return 0, 0
    blocks = len(model.blocks)
    return model.regions * blocks, (model.regions - 1) * blocks


def _cross_entropy(model: ModelShape, step: StepShape) -> Volumes:
    """Over a vocabulary that is split: the largest logits of a chunk, then the sums of exponentials and the targets'
    logits together."""
    if not model.heads:
        return {}
    return {Flow("tensor", "all-reduce"): Volume(2 * sum(step.chunks), 3 * sum(step.targets) * step.loss)}


def _context(layout: Layout, model: ModelShape, step: StepShape) -> Volumes:
    """What attention needs of a row that is split over processes.

    ``gather``: keys and values of all tokens, in each block; their gradients are scattered in sums. ``ulysses``:
    queries, keys, values and outputs change from a part of the tokens to a part of the heads, and back.
    """
    if layout.context == 1:
        return {}
    passes = len(model.blocks) * (2 if layout.recompute == "full" else 1)
    own = sum(step.tokens) * step.activation
    if layout.context_by == "gather":
        both = Volume(step.micro_batches, 2 * layout.context * own * model.key_value_width)
        return {
            Flow("context", "all-gather"): both * passes,
            Flow("context", "reduce-scatter"): both * len(model.blocks),
        }
    exchanged = Volume(4 * step.micro_batches, 2 * own * (model.query_width + model.key_value_width))
    return {Flow("context", "all-to-all"): exchanged * (passes + len(model.blocks))}


def _pipe(layout: Layout, model: ModelShape, step: StepShape) -> Volumes:
    """Hidden states to the next stage and their gradients back, a micro-batch at a time."""
    if layout.pipeline == 1:
        return {}
    own = sum(step.tokens) // (layout.tensor if layout.sequence else 1)
    message = Volume(step.micro_batches, own * model.width * step.activation)
    return {
        Flow("pipe", "send"): message * model.boundaries,
        Flow("pipe", "receive"): message * model.boundaries,
    }


def _once(layout: Layout, model: ModelShape, step: StepShape) -> Volumes:
    """What is summed once a step: partial and tied gradients, and a few numbers."""
    sharers = layout.sharers
    partial = sum(p.shard(sharers) for p in model.parameters if p.partial and p.trained)
    number = Volume(1, step.gradient)
    return added(
        {
            Flow("tensor", "all-reduce"): Volume(1 if partial else 0, partial * step.gradient),
            Flow("ends", "all-reduce"): Volume(1 if model.tied else 0, model.tied * step.gradient),
        },
        # The squares of the gradient norm: of parameters that tensor processes split, and of the others.
        {Flow("shard", "all-reduce"): number + Volume(0, step.gradient)} if sharers > 1 else {},
        {Flow("tensor", "all-reduce"): number} if layout.tensor > 1 else {},
        {Flow("pipe", "all-reduce"): number} if layout.pipeline > 1 else {},
        # Targets, tokens and passes of every data process; the loss, whether it or the gradient is not finite, and
        # whether a process was told to stop.
        {Flow("batch", "all-reduce"): Volume(1, 3 * INTEGER * layout.data)} if layout.data > 1 else {},
        {Flow("world", "all-reduce"): Volume(1, 3 * DOUBLE)} if layout.world > 1 else {},
    )
