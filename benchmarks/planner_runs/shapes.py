"""The shape of a model of which a table of measurements states only sizes.

What is not stated is inferred. The candidates, in the order in which they are preferred:

1. the model of that name in the catalogue, where its width and heads are those stated (other sizes are taken over);
2. a GPT: plain MLP, biases, learnt positions, head tied to the embedding;
3. a Llama: gated MLP, RMS norms, a head of its own; and before the GPT where the MLP is not 4 times as wide as the
   hidden states or there are fewer key-value heads than heads, which no GPT has;
4. a GPT with a head of its own; 5. a Llama with a tied head.

The first whose count, rounded as the stated number of parameters is, equals it; else the one that comes nearest.
Without a stated number the first of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from math import log
from typing import Any

from stoker.errors import Problem, UserError
from stoker.plan.shape import ExpertMixture, Layer, Shape
from stoker.plan.shapes.model_names import known_shape

VOCABULARY = 51200  # of a model whose vocabulary is not stated: GPT-2's, padded as Megatron-LM does for 8 ways
HEAD_SIZE = 128
ASPECT = 128  # width per layer of a model of which only the number of parameters is stated (Kaplan et al., 2020)


def shape_of_row(row: Mapping[str, Any]) -> Shape:
    """The shape of a row of measurements with the fields ``model_name``, ``params``, ``layers``, ``hidden``, ...

    Raises:
        UserError: see `shape_of_fields`.
    """
    return shape_of_fields(
        name=row.get("model_name") or "",
        layers=row.get("layers"),
        width=row.get("hidden"),
        heads=row.get("heads"),
        kv_heads=row.get("kv_heads"),
        mlp_width=row.get("ffn"),
        vocabulary=row.get("vocab"),
        parameters=row.get("params"),
        active_parameters=row.get("active_params"),
        seq_len=row.get("seq_len"),
    )


@cache
def shape_of_fields(
    *,
    name: str = "",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    mlp_width: int | None = None,
    vocabulary: int | None = None,
    parameters: float | None = None,
    active_parameters: float | None = None,
    seq_len: int | None = None,
) -> Shape:
    """The shape that stated sizes mean, see this file's head for what is inferred.

    Args:
        parameters: in total, rounded or exact.
        active_parameters: that a token meets; less than the total means a sparse mixture.
        seq_len: rows of a GPT's learnt positions.

    Raises:
        UserError: neither a known name nor layers and width nor a number of parameters is stated.
    """
    known = known_shape(name)
    stated = {"kv_heads": kv_heads, "mlp_width": mlp_width, "vocabulary": vocabulary}
    candidates: list[Shape] = []
    if known is not None and width in {None, known.width} and heads in {None, known.heads}:
        changes: dict[str, Any] = {key: value for key, value in stated.items() if value is not None}
        if known.latent is not None:
            changes.pop("kv_heads", None)
        candidates.append(replace(known.with_layers(layers or known.layers), **changes))
        if layers is None or width is None or known.mixture is not None:
            return replace(candidates[0], name=name)
    if layers is None or width is None:
        if not parameters:
            text = f"the shape of `{name}` is unknown"
            raise UserError(Problem(text, "state its layers and width, or its number of parameters"))
        layers, width = _proportioned(parameters)
    heads = heads or max(width // HEAD_SIZE, 1)
    size = Shape(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_size=width // heads,
        mlp_width=mlp_width or 4 * width,
        vocabulary=vocabulary or VOCABULARY,
    )
    candidates += _generic(size, positions=seq_len or 2048)
    shape = replace(_chosen(candidates, parameters), name=name)
    if parameters and active_parameters and active_parameters < 0.9 * parameters:
        return _sparse(shape, parameters, active_parameters)
    return shape


def _generic(size: Shape, *, positions: int) -> Iterator[Shape]:
    gpt = replace(
        *(size,), positions=positions, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True, fused_qkv=True
    )
    llama = replace(size, gated=True, norm="rms", tied=False)
    plain = size.mlp_width == 4 * size.width and size.kv_heads == size.heads
    yield from (gpt, llama) if plain else (llama, gpt)
    yield replace(gpt, tied=False)
    yield replace(llama, tied=True)


def _chosen(candidates: list[Shape], parameters: float | None) -> Shape:
    if not parameters:
        return candidates[0]
    unit = _rounded_to(parameters)
    for shape in candidates:
        if abs(shape.parameters - parameters) <= unit / 2:
            return shape
    return min(candidates, key=lambda shape: abs(log(shape.parameters / parameters)))


def _rounded_to(number: float) -> int:
    """The unit of the last digit that is not zero: 10 million for 1,340,000,000."""
    digits, unit = round(number), 1
    while digits and digits % (10 * unit) == 0:
        unit *= 10
    return unit


def _proportioned(parameters: float) -> tuple[int, int]:
    """Layers and width of a GPT with this number of parameters: 12 L (128 L)^2 of them in its matrices."""
    layers = max(round((parameters / (12 * ASPECT**2)) ** (1 / 3)), 1)
    return layers, ASPECT * layers


def _sparse(shape: Shape, parameters: float, active: float) -> Shape:
    """A mixture whose totals are those stated: eight experts a token, as wide together as the active rest asks for."""
    rest = replace(shape, pattern=(Layer(feed_forward="none"),) * shape.layers).parameters
    per_token, matrices = 8, 3 if shape.gated else 2
    width = max(round((active - rest) / shape.layers / (per_token * matrices * shape.width)), 1)
    each = shape.layers * matrices * shape.width * width
    experts = max(round((parameters - rest) / each), per_token)
    return replace(shape, mixture=ExpertMixture(experts, per_token, width))


@lru_cache(maxsize=4096)
def balanced(shape: Shape, count: int) -> tuple[int, ...]:
    """Blocks of stages that are filled until they have their share of all matrices, the head among them.

    As nanotron does: a stage takes the block that goes beyond its share, too.
    """
    costs = [shape.active_layer_parameters(i) for i in range(shape.layers)]
    total = sum(costs) + shape.head_matmul().parameters
    sizes, done = [0] * count, 0
    for cost in costs:
        stage = next(i for i in range(count) if i == count - 1 or done <= total * (i + 1) / count)
        sizes[stage] += 1
        done += cost
    return tuple(sizes)
