"""The matrix products of a layer: the matrices that each token is multiplied with, and their tensor-parallel split.

Sources: Shoeybi et al., 2019 (Megatron-LM), section 3 (column- and row-parallel products); Shazeer, 2019 and Ainslie et
al., 2023 (fewer key-value heads); Shazeer, 2020 (gated MLPs); DeepSeek-AI, 2024 (V2), section 2.1 (latent attention);
Dao and Gu, 2024 (Mamba-2); Yang et al., 2025 (gated delta nets); Raffel et al., 2020 (cross-attention). The biases are
those of the models' own code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from stoker.plan.layer import DeltaNet, ExpertMixture, Indexer, Latent, LayerSizes, StateSpace

if TYPE_CHECKING:
    from stoker.plan.shape import Shape

Split = Literal["column", "row", "replicated"]

INDEXER = ("index query", "index key", "index weights")
# Matrices that no adapter on all linear layers reaches: they are stacked, or a module of another kind, or not trained.
STACKED = ("router", "expert up", "expert down", *INDEXER)
# Products of the input of linear attention.
LINEAR_IN = ("linear qkvz", "linear ba", "linear qkv", "linear z", "linear b", "linear a")


@dataclass(frozen=True)
class Matmul:
    """A product of each token with a matrix.

    Attributes:
        name: the operator: ``qkv``, ``attention output``, ``up`` (with the gate), ``down``, ``router``, ``expert up``,
            ``expert down``, ``shared up``, ``shared down``, ``shared gate``, ...
        inputs, outputs: sizes of the whole matrix.
        split: by tensor parallelism: ``column`` splits the outputs, ``row`` the inputs.
        bias: whether a vector of the outputs is added.
        copies: number of such matrices in a layer: its experts.
        uses: number of them that a token is multiplied with.
        parts: the outputs of each module where several make up the product in training (separate queries, keys and
            values); 0 for one that a layer does not have.
    """

    name: str
    inputs: int
    outputs: int
    split: Split
    bias: bool = False
    copies: int = 1
    uses: int = 1
    parts: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Elements of all copies, with their biases."""
        return self.copies * self.held

    @property
    def active_parameters(self) -> int:
        """Elements that one token is multiplied with or gets added."""
        return self.uses * self.held

    @property
    def held(self) -> int:
        """Elements of one copy."""
        return self.inputs * self.outputs + self.outputs * self.bias

    @property
    def forward_flop(self) -> int:
        """FLOP for one token: a multiplication and an addition per element (biases are not counted)."""
        return 2 * self.uses * self.inputs * self.outputs

    @property
    def modules(self) -> tuple[int, ...]:
        """Outputs of each module of the product."""
        return self.parts or (self.outputs,)


def attention_matmuls(shape: Shape, sizes: LayerSizes | None) -> tuple[Matmul, ...]:
    """Queries, keys, values and the output of attention."""
    if shape.latent is not None:
        return _latent_matmuls(shape, shape.latent)
    output, value = shape.value_width, shape.kv_heads * (shape.value_size or shape.head_size)
    query = shape.query_width * (2 if shape.output_gate and not shape.gate_apart else 1)
    gate = (output,) if shape.gate_apart else ()
    parts: tuple[int, ...] = (query, shape.key_value_width, value, *gate)
    if sizes is not None:
        value_size = shape.value_size or sizes.head_size
        output, value = shape.heads * value_size, sizes.kv_heads * value_size
        key = sizes.kv_heads * sizes.head_size
        parts = (shape.heads * sizes.head_size, key * ("k" in sizes.projects), value * ("v" in sizes.projects))
    return (
        Matmul(
            *("qkv", shape.width, sum(parts), "column"),
            bias=shape.qkv_bias,
            parts=() if shape.fused_qkv and not shape.splits_fused else parts,
        ),
        Matmul("attention output", output, shape.width, "row", bias=shape.output_bias),
    )


def input_matmuls(shape: Shape) -> tuple[Matmul, ...]:
    """The products of a layer with its own embedding of each token: down to its width, and up again (Gemma 4)."""
    return (
        Matmul("layer input gate", shape.width, shape.layer_input_width, "replicated"),
        Matmul("layer input projection", shape.layer_input_width, shape.width, "replicated"),
    )


def _latent_matmuls(shape: Shape, latent: Latent) -> tuple[Matmul, ...]:
    query = shape.heads * (latent.content_size + latent.rotary_size)
    key_value = shape.heads * (latent.content_size + latent.value_size)
    queries: tuple[Matmul, ...]
    if latent.query_rank:
        queries = (
            Matmul("query down", shape.width, latent.query_rank, "replicated", bias=shape.qkv_bias),
            Matmul("query up", latent.query_rank, query, "column"),
        )
    else:
        queries = (Matmul("query up", shape.width, query, "column"),)
    down = latent.key_value_rank + latent.rotary_size
    return (
        *queries,
        Matmul("key-value down", shape.width, down, "replicated", bias=shape.qkv_bias),
        Matmul("key-value up", latent.key_value_rank, key_value, "column"),
        Matmul("attention output", shape.heads * latent.value_size, shape.width, "row", bias=shape.output_bias),
    )


def indexer_matmuls(shape: Shape, indexer: Indexer, latent: Latent) -> tuple[Matmul, ...]:
    """Returns the queries, the keys and the heads' weights of an indexer, which reads the compressed queries."""
    query, key, weights = INDEXER
    return (
        Matmul(query, latent.query_rank, indexer.heads * indexer.size, "replicated"),
        Matmul(key, shape.width, indexer.size, "replicated"),
        Matmul(weights, shape.width, indexer.heads, "replicated"),
    )


def mlp_matmuls(
    shape: Shape, mlp_width: int, *, inputs: int, prefix: str = "", copies: int = 1, uses: int = 1
) -> tuple[Matmul, ...]:
    """Returns an MLP with ``inputs`` inputs and outputs: a gated one has the gate with the product upwards."""
    up = (mlp_width,) * (2 if shape.gated else 1)
    # Experts have one parameter for both, with those of all experts.
    together = len(up) == 1 or copies > 1 or (shape.fused_gate and not shape.splits_fused)
    products = (
        Matmul(f"{prefix}up", inputs, sum(up), "column", bias=shape.mlp_bias, parts=() if together else up),
        Matmul(f"{prefix}down", mlp_width, inputs, "row", bias=shape.mlp_bias),
    )
    return tuple(replace(matmul, copies=copies, uses=uses) for matmul in products)


def mixture_matmuls(shape: Shape, mixture: ExpertMixture) -> tuple[Matmul, ...]:
    """Router, experts and shared experts of a sparse mixture."""
    into = mixture.latent_width or shape.width
    matmuls = [Matmul("router", shape.width, mixture.experts, "replicated", bias=mixture.router_bias)]
    if mixture.latent_width:
        matmuls.append(Matmul("expert latent down", shape.width, mixture.latent_width, "replicated"))
    matmuls += mlp_matmuls(
        shape, mixture.width, inputs=into, prefix="expert ", copies=mixture.experts, uses=mixture.per_token
    )
    if mixture.latent_width:
        matmuls.append(Matmul("expert latent up", mixture.latent_width, shape.width, "replicated"))
    if mixture.shared_width:
        matmuls += mlp_matmuls(shape, mixture.shared_width, inputs=shape.width, prefix="shared ")
    if mixture.shared_gate:
        matmuls.append(Matmul("shared gate", shape.width, 1, "replicated"))
    return tuple(matmuls)


def state_space_matmuls(shape: Shape, space: StateSpace) -> tuple[Matmul, ...]:
    """Projections into and out of a Mamba-2 layer: values and their gate, the two state matrices, step sizes."""
    into = 2 * space.inner + 2 * space.groups * space.state + space.heads
    return (
        Matmul("state in", shape.width, into, "column"),
        Matmul("state out", space.inner, shape.width, "row"),
    )


def delta_net_matmuls(shape: Shape, net: DeltaNet) -> tuple[Matmul, ...]:
    """Projections into and out of linear attention: queries, keys, values, the gate, two decays of each head."""
    heads, parts = net.value_heads, (net.key_width, net.key_width, net.value_width)
    into: tuple[Matmul, ...]
    if net.one_product:
        into = (
            Matmul("linear qkvz", shape.width, net.channels + net.value_width, "column"),
            Matmul("linear ba", shape.width, 2 * heads, "column"),
        )
    else:
        into = (
            Matmul("linear qkv", shape.width, net.channels, "column", parts=parts if shape.splits_fused else ()),
            Matmul("linear z", shape.width, net.value_width, "column"),
            Matmul("linear b", shape.width, heads, "column"),
            Matmul("linear a", shape.width, heads, "column"),
        )
    return (*into, Matmul("linear output", net.value_width, shape.width, "row"))
