"""Seconds of passes of transformers' own code, from the calibration of the device.

Every product is looked up at its own sizes in the measured table; every other operator of eager code reads and writes
its tensors in turn, at the bandwidth measured for tensors of that size; attention has its own curve. Nothing here
is fitted to runs: the numbers below count the operators in the models' code.

Units: seconds; "passes" are tensors read or written, of a width, once for every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from stoker.hardware.measured.calibration import HEAD_SIZES, Calibration
from stoker.plan.block_dtypes import FLOAT, BlockDtypes
from stoker.plan.eager_traits import code_of
from stoker.plan.layer import RULE_CHUNK, DeltaNet, Layer
from stoker.plan.matmul import Matmul
from stoker.plan.memory.head_memory import CHUNK, CHUNK_GPU
from stoker.plan.memory.stoker_memory import types_of
from stoker.plan.param_placement import stepped_parameters
from stoker.plan.pipeline.timeline import StageTime
from stoker.plan.setting import Setting
from stoker.plan.shape import Shape
from stoker.plan.trainable_params import matmul_elements

# Passes over the hidden states, (forward, backward). A write counts twice: a cache reads the line first.
# Square, mean, times the root, times the weight; backward each of these, and the sums over the row and over all tokens.
RMS_NORM = (10, 29)
# A fused kernel that is bound by arithmetic: the passes that take as long.
LAYER_NORM = (10, 15)
RESIDUAL = (4, 4)  # the sum; backward the sum of the two gradients that meet before it
# Queries and keys: two products, the rotated half, their sum; backward the parts are concatenated.
ROTARY = (15, 22)
# The result from segments to a row, from heads to a width; backward the gradients of queries, keys and values too.
ARRANGED = (6, 18)
GATE = (4, 8)  # the gate's product with the rest
NONLINEAR = (2, 3)  # in one kernel, at its own rate
MANY_READERS = 4  # backward: each further product that reads a tensor adds a gradient to the sum
# Attention that materialises its scores: scale, mask, softmax (or cap), and the saved tensors of each.
SCORES, SCORE_PRODUCTS = (12, 18), (2, 4)
# Linear attention in PyTorch: pairs of tokens in a chunk, queries and keys, values. Slicing a chunk gives a gradient
# that is zero elsewhere. Triangular systems are solved at a fraction of the rate of products, measured on a CPU.
DELTA_RULE = ((18, 38, 18), (26, 52, 26))
PASSES_OF_CHUNK, TRIANGULAR = 5, 6
CONVOLUTION, GATED_NORM = (8, 14), (22, 40)
CAST = (6, 6)  # bytes: from float32 to 16 bits, and the gradient back
# Operators of a block: with norms written out, rotary positions and a gate there are about this many.
OPERATORS = (70, 110)
# The head: the largest (slow, as its place is found too), their difference, the exponential, its sum, the division.
LOGITS = 13
STEPPED = 28  # bytes of AdamW a parameter: weight, gradient, two moments; three of them written
CLIPPED = 12  # bytes of a gradient that is measured, then scaled


def measured_passes(setting: Setting) -> MeasuredPasses | None:
    """Returns the times of passes by the cluster's calibration; None if it lacks their products and operators.

    Only for Stoker: other programs have fused kernels, which were not measured.
    """
    found = setting.cluster.calibration
    if found is None or setting.software.name != "stoker" or setting.work.precision not in found.precisions:
        return None
    measured = found.curve("multiply") and found.curve(f"attention-backward-{HEAD_SIZES[0]}")
    return MeasuredPasses(found) if measured else None


@dataclass(frozen=True)
class MeasuredPasses:
    """Passes on a device whose ceilings were measured.

    Attributes:
        calibration: of the device, with the threads that a process has.
    """

    calibration: Calibration

    def block_pass(self, setting: Setting, layer: Layer) -> StageTime:
        """Returns the passes of one block and micro-batch without collectives; recomputation included."""
        shape, layout, work = setting.shape, setting.layout, setting.work
        types = types_of(setting)
        tokens = setting.tokens
        products = [self._product(m, tokens, setting) for m in shape.matmuls(layer)]
        forward = sum(product.forward for product in products)
        inputs = sum(product.backward_input for product in products)
        weights = sum(product.backward_weight for product in products)
        attention = self._attention(setting, layer)
        moved = self._moved(shape, layer, types, tokens, layout.tensor)
        forward += attention[0] + moved[0]
        inputs += attention[1] + moved[1]
        if types.casts and work.tuning == "full":
            held = sum(m.parameters for m in shape.matmuls(layer)) / layout.tensor
            forward += self._traffic(CAST[0] * held)
            weights += self._traffic(CAST[1] * held)
        calls = [
            operators * self.calibration.call_seconds(backward=back)
            for operators, back in zip(OPERATORS, (False, True), strict=True)
        ]
        if setting.cluster.device.is_cpu:  # computes and calls in turn; a GPU computes while it is called
            forward, inputs = forward + calls[0], inputs + calls[1]
        else:
            forward, inputs = max(forward, calls[0]), max(inputs, calls[1] - weights)
        if layout.recompute == "full":
            inputs += forward
        elif layout.recompute == "selective":
            again = sum(p.forward for m, p in zip(shape.matmuls(layer), products, strict=True) if _of_mlp(m))
            inputs += again + self._inside(shape, layer, types, tokens, layout.tensor)[0]
        return StageTime(forward, inputs, weights)

    def head_pass(self, setting: Setting) -> StageTime:
        """Head and cross entropy of a micro-batch. All gradients are computed with the loss, then scaled."""
        shape, tensor, tokens = setting.shape, setting.layout.tensor, setting.predicting
        trained = setting.work.trains_head
        product = self._product(shape.head_matmul(), tokens, setting, trained=trained)
        words = shape.outputs / tensor
        size = CHUNK if setting.cluster.device.is_cpu else CHUNK_GPU
        chunk = min(tokens, max(1.0, size / (FLOAT * words)))
        logits = self._passes(LOGITS, chunk, words, FLOAT) * tokens / chunk
        # The head's gradient is set to zero, scaled, and meets that of the embedding.
        table = words * (shape.embedding_width or shape.width) * FLOAT * trained
        after = self._traffic(2 * table) + self._traffic(3 * table)
        return StageTime(product.total + logits + self._traffic(table), after, 0.0)

    def optimizer_seconds(self, setting: Setting) -> float:
        """Clipping and AdamW, for the parameters that the process steps."""
        stepped = stepped_parameters(setting)
        return self._traffic(CLIPPED * stepped, kind="add") + self._traffic(STEPPED * stepped, kind="add")

    def _product(self, matmul: Matmul, tokens: float, setting: Setting, *, trained: bool | None = None) -> StageTime:
        """Returns the time of a matrix product: forward, and backward for the input's and the weights' gradients."""
        work, tensor = setting.work, setting.layout.tensor
        trained = work.tuning == "full" if trained is None else trained
        rows = max(1, round(tokens * matmul.uses / max(1, matmul.copies // setting.expert)))
        inputs, outputs = matmul.inputs, matmul.outputs
        if matmul.split == "row":
            inputs = max(1, inputs // tensor)
        elif matmul.split == "column":
            outputs = max(1, outputs // tensor)
        flop = 2 * tokens * matmul.uses * inputs * outputs

        def seconds(m: int, n: int, k: int) -> float:
            return flop / self.calibration.matmul_rate(m, n, k, work.precision)

        weights = seconds(outputs, inputs, rows) if trained else 0.0
        narrow = 0.0
        elements = matmul_elements(setting.shape, matmul, work.rank, work.adapters) if work.low_rank else 0
        if elements and matmul.name != "head":
            adapters = 2 * tokens * elements * matmul.uses / max(1, matmul.copies) / tensor
            narrow = adapters / self.calibration.matmul_rate(rows, work.rank, inputs, work.precision)
        return StageTime(
            seconds(rows, outputs, inputs) + narrow, seconds(rows, inputs, outputs) + narrow, weights + narrow
        )

    def _attention(self, setting: Setting, layer: Layer) -> tuple[float, float]:
        shape, work = setting.shape, setting.work
        if layer.linear and shape.delta_net is not None:
            return self._delta_rule(setting, shape.delta_net)
        if not layer.attentions:
            return 0.0, 0.0
        rows = setting.micro_batch * work.rows
        heads = layer.attentions * rows * shape.heads / setting.layout.tensor / setting.layout.context
        code = code_of(shape)
        if setting.cluster.device.is_cpu and (code.softcap or (code.drops_scores and shape.dropout)):
            return self._scored(heads, work.attended, shape, work.precision)
        size = max(1, round((shape.query_width + shape.value_width) / 2 / shape.heads))
        reach = min(layer.window or work.attended, work.attended)
        windows = work.attended / reach  # masked rows compute all of it, but not faster than a window's share
        forward, backward = (
            heads * windows * self.calibration.attention(size, reach, backward=back) for back in (False, True)
        )
        return forward, backward

    def _delta_rule(self, setting: Setting, net: DeltaNet) -> tuple[float, float]:
        """Returns the seconds of linear attention from its convolution to its gated norm: transformers' own code on a
        CPU, the kernels of flash-linear-attention on a GPU.
        """
        tensor, cpu = setting.layout.tensor, setting.cluster.device.is_cpu
        tokens, types = setting.tokens / tensor, types_of(setting)
        rate = self.calibration.matmul_rate(RULE_CHUNK, RULE_CHUNK, net.key_size, setting.work.precision)
        systems = net.value_heads * RULE_CHUNK * (net.key_size + net.value_size) * (TRIANGULAR if cpu else 0)
        pairs, keys, values = net.value_heads * RULE_CHUNK, net.value_heads * net.key_size, net.value_width
        found = []
        for back in (0, 1):
            products = (1 + back) * tokens * (net.forward_flop + systems) / rate
            moved = self._passes(CONVOLUTION[back], tokens, net.channels, types.product)
            moved += self._passes(GATED_NORM[back], tokens, values, FLOAT)
            if cpu:  # the gradient of each chunk is added to one of the whole document
                chunks = PASSES_OF_CHUNK * back * ceil(setting.work.attended / RULE_CHUNK)
                for passes, tensors, width in zip(DELTA_RULE[back], (1, 3, 1), (pairs, keys, values), strict=True):
                    moved += self._passes(passes + tensors * chunks, tokens, width, FLOAT)
            else:
                size = pairs + 3 * keys + 3 * values + net.state / RULE_CHUNK
                moved += self._passes(4 + 4 * back, tokens, size, types.product)
            found.append(products + moved)
        return found[0], found[1]

    def _scored(self, heads: float, seq_len: int, shape: Shape, precision: str) -> tuple[float, float]:
        """Returns the seconds of attention that materialises its scores, including masked ones."""
        flop = 2 * heads * seq_len**2 * shape.head_size
        product = flop / self.calibration.matmul_rate(seq_len, seq_len, shape.head_size, precision)
        found = [
            products * product + self._passes(passes, heads * seq_len, seq_len, FLOAT)
            for products, passes in zip(SCORE_PRODUCTS, SCORES, strict=True)
        ]
        if shape.dropout:
            found[0] += self._traffic(4 * heads * seq_len**2 * FLOAT, kind="dropout")
        return found[0], found[1]

    def _moved(self, shape: Shape, layer: Layer, types: BlockDtypes, tokens: float, tensor: int) -> tuple[float, float]:
        """Seconds (forward, backward) of all operators but products and attention."""
        code = code_of(shape)
        inside = self._inside(shape, layer, types, tokens, tensor)
        norm = RMS_NORM if shape.norm == "rms" or code.norm else LAYER_NORM
        found = []
        for back in (0, 1):
            norms, sums = norm[back] * shape.norms, RESIDUAL[back] * (1 if shape.parallel_residual else 2)
            seconds = self._passes(norms, tokens, shape.width, types.promoted, operators=norms / 4)
            seconds += self._passes(sums, tokens, shape.width, types.stream, operators=sums / 4)
            if layer.attentions:
                queries = (shape.query_width + shape.key_value_width) / tensor
                seconds += self._passes(ARRANGED[back], tokens, shape.value_width / tensor, types.product)
                if code.rotary:
                    seconds += self._passes(ROTARY[back], tokens, queries, types.product)
                if shape.query_key_norm != "none":
                    seconds += self._passes(RMS_NORM[back], tokens, queries, FLOAT)
            if shape.dropout:
                kind = "multiply" if back else "dropout"
                seconds += 2 * self._traffic(4 * tokens * shape.width * types.product, kind=kind)
            readers = 2 * layer.attentions * (not shape.fused_qkv) + shape.gated
            if back:
                seconds += readers * self._passes(MANY_READERS, tokens, shape.width, types.product, operators=1)
            found.append(seconds + inside[back])
        return found[0], found[1]

    def _inside(
        self, shape: Shape, layer: Layer, types: BlockDtypes, tokens: float, tensor: int
    ) -> tuple[float, float]:
        """Seconds, forward and backward, between the products of the MLP or of the experts."""
        code = code_of(shape)
        width: float = shape.mlp_width if layer.feed_forward == "dense" else 0
        gathered = 0.0
        if layer.feed_forward == "experts" and shape.mixture is not None:
            mixture = shape.mixture
            width = mixture.per_token * mixture.width + mixture.shared_width
            gathered = mixture.per_token * shape.width
        width /= tensor
        found = []
        for back in (0, 1):
            seconds = 2 * self._passes(2 + back, tokens, gathered, types.promoted) if gathered else 0.0
            size = NONLINEAR[back] * tokens * width * types.product
            seconds += self._traffic(size, kind="silu" if code.nonlinearity > 1 else "multiply")
            if shape.gated:
                seconds += self._passes(GATE[back], tokens, width, types.product)
            found.append(seconds)
        return found[0], found[1]

    def _passes(
        self, passes: float, tokens: float, width: float, size: int, *, operators: float | None = None
    ) -> float:
        """Seconds of operators that read or write this number of tensors, about four each."""
        operators = operators or max(1.0, passes / 4)
        return operators * self._traffic(passes / operators * tokens * width * size)

    def _traffic(self, size: float, *, kind: str = "multiply") -> float:
        """Returns the seconds of one operator that reads and writes this number of bytes."""
        if size <= 0:
            return 0.0
        bandwidth = self.calibration.bandwidth(kind, size) or self.calibration.bandwidth("copy", size)
        assert bandwidth is not None, "a calibration has curves of memory"
        return size / bandwidth


def _of_mlp(matmul: Matmul) -> bool:
    return matmul.name.split()[-1] in ("up", "down", "router", "gate") and not matmul.name.startswith(("query", "key"))
