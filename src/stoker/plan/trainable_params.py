"""Trained elements of a frozen model: low-rank matrices, virtual tokens, whole layers.

Sources: Hu et al., 2021 (LoRA); Lester et al., 2021 (prompt tuning); Li and Liang, 2021 (prefix tuning); Liu et al.,
2021 (P-tuning). The encoders are those of peft.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from stoker.job.keys.tune_keys import ADAPTERS
from stoker.plan.matmul import LINEAR_IN, STACKED, Matmul
from stoker.plan.shape import Shape

Tuning = Literal["full", "lora", "qlora", "prefix", "prompt", "p-tuning"]
Encoder = Literal["none", "mlp", "lstm", "projection"]
DEPTH = 2  # layers of the encoder's LSTM

# Products by the names that models have for their modules, and which of a product's parts: see `Matmul`.
ProjectionPart = tuple[str, int | None]
GATE: tuple[ProjectionPart, ...] = (("up", 0), ("shared up", 0))
UP: tuple[ProjectionPart, ...] = (("up", 1), ("shared up", 1))
DOWN: tuple[ProjectionPart, ...] = (("down", None), ("shared down", None), ("expert down", None))
MODULES: dict[str, tuple[ProjectionPart, ...]] = {
    "q_proj": (("qkv", 0), ("query up", None)),
    "query": (("qkv", 0),),
    **dict.fromkeys(("k_proj", "key"), (("qkv", 1),)),
    **dict.fromkeys(("v_proj", "value"), (("qkv", 2),)),
    **dict.fromkeys(("c_attn", "query_key_value", "qkv_proj", "Wqkv"), (("qkv", None),)),
    "q_a_proj": (("query down", None),),
    "q_b_proj": (("query up", None),),
    "kv_a_proj_with_mqa": (("key-value down", None),),
    "kv_b_proj": (("key-value up", None),),
    **dict.fromkeys(("o_proj", "out_proj", "dense"), (("attention output", None),)),
    **dict.fromkeys(("c_fc", "fc1", "fc_in", "dense_h_to_4h"), (("up", None),)),
    "gate_up_proj": (("up", None), ("expert up", None)),
    **dict.fromkeys(("gate_proj", "gate"), GATE),
    **dict.fromkeys(("up_proj", "up"), UP),
    "down_proj": DOWN,
    **dict.fromkeys(("fc2", "fc_out", "dense_4h_to_h", "c_proj"), (("down", None),)),
    "shared_expert_gate": (("shared gate", None),),
    "per_layer_input_gate": (("layer input gate", None),),
    "per_layer_projection": (("layer input projection", None),),
}
OF_GPT2 = MODULES | {"c_proj": (("attention output", None), ("down", None))}
OF_DELTA_NET = MODULES | {
    **{name.replace("linear ", "in_proj_"): ((name, None),) for name in LINEAR_IN},
    **{name: (("linear qkv", part),) for part, name in enumerate(("query", "key", "value"))},
    "out_proj": (("linear output", None),),
}
GATE_OF_ATTENTION = 3  # part of the product
OF_GATED_ATTENTION = MODULES | {"gate_proj": (*GATE, ("qkv", GATE_OF_ATTENTION))}
OF_MLP = ("up", "down", "shared up", "shared down")
# The places of the products in a block; others are in its attention.
ATTENTION = ("self_attn", "attn", "attention", "self_attention")
PARENTS = {
    **dict.fromkeys(("up", "down", "shared gate"), ("mlp", "feed_forward")),
    **dict.fromkeys(
        ("shared up", "shared down"), ("mlp.shared_expert", "mlp.shared_experts", "feed_forward.shared_expert")
    ),
    **dict.fromkeys(("expert up", "expert down"), ("mlp.experts", "feed_forward.experts")),
    **dict.fromkeys((*LINEAR_IN, "linear output"), ("linear_attn",)),
}
# Layers between an embedding of another width and the blocks.
PROJECTIONS = ("project_in", "project_out")
# Families whose dense MLPs and shared experts get no adapter: peft takes their names for those of the experts' single
# matrices (`stoker.models.tuning.adapter_targets`).
EXPERTS_NAMES = (
    *("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    *("exaone_moe", "solar_open", "afmoe"),
    *("dots1", "ernie4_5_moe", "hunyuan_v1_moe", "qwen3_next"),
)
HEADS = ("lm_head", "embed_out", "output")
LAYER_INPUTS = "per_layer_model_projection"  # of the embedding to those of all layers (Gemma 4)
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embedding")
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")


@dataclass(frozen=True)
class Adapters:
    """Adapters of a job.

    Attributes:
        targets: names or patterns of modules that get low-rank matrices; None for all linear layers.
        blocks: that get them; None for all.
        modules: names of layers that are trained in full.
        tokens: virtual ones before every row.
        encoder: the network that makes them: none, three linear layers, an LSTM before two, or (of a prefix) two
            linear layers.
        width: of its hidden layer; 0 for the model's own.
        deep: whether there are virtual keys and values in every block, and no virtual tokens in the row.
    """

    targets: tuple[str, ...] | None = None
    blocks: tuple[int, ...] | None = None
    modules: tuple[str, ...] = ()
    tokens: int = 0
    encoder: Encoder = "none"
    width: int = 0
    deep: bool = False

    @property
    def positions(self) -> int:
        """Positions that every block computes in addition to the row's own tokens."""
        return 0 if self.deep else self.tokens

    @property
    def prefix(self) -> int:
        """Positions that are attended to in every block, and computed in none."""
        return self.tokens if self.deep else 0


PLAIN = Adapters()


@lru_cache(maxsize=256)
def trained_elements(shape: Shape, tuning: Tuning, rank: int, adapters: Adapters = PLAIN) -> int:
    """Elements that are trained; all of the model's under ``full``."""
    if tuning == "full":
        return shape.parameters
    if tuning in ADAPTERS:
        return lora_elements(shape, rank, adapters) + all_whole_elements(shape, adapters)
    return virtual_elements(shape, adapters)


def lora_elements(shape: Shape, rank: int, adapters: Adapters = PLAIN) -> int:
    """Elements of the low-rank matrices of the chosen modules in the chosen blocks."""
    blocks = range(shape.layers) if adapters.blocks is None else adapters.blocks
    inside = sum(
        matmul_elements(shape, matmul, rank, adapters)
        for index in blocks
        if index < shape.layers
        for matmul in shape.layer_matmuls(index)
    )
    if adapters.blocks is not None:
        return inside
    if shape.layer_input_width and (adapters.targets is None or LAYER_INPUTS in map(_leaf, adapters.targets)):
        return inside + rank * (shape.width + shape.layers * shape.layer_input_width)
    if not shape.embedding_width:
        return inside
    wanted = PROJECTIONS if adapters.targets is None else adapters.targets
    projections = sum(_leaf(target) in PROJECTIONS for target in wanted)
    return inside + projections * rank * (shape.embedding_width + shape.width)


def matmul_elements(shape: Shape, matmul: Matmul, rank: int, adapters: Adapters = PLAIN) -> int:
    """Elements of the low-rank matrices on one product, where its block has some; modules that are trained in full get
    none.
    """
    unnamed = shape.family in EXPERTS_NAMES and matmul.name in OF_MLP
    if unnamed or (adapters.targets is None and matmul.name in STACKED):
        return 0
    modules = range(len(matmul.modules))
    if adapters.targets is None:
        chosen = set(modules)
    else:
        chosen = {i for target in adapters.targets for i in _selected(shape, matmul, target, unknown=modules)}
    chosen -= {i for name in adapters.modules for i in _selected(shape, matmul, name)}
    if shape.gate_apart and matmul.name == "qkv":
        chosen.discard(GATE_OF_ATTENTION)  # peft takes its name for that of the experts' too
    chosen = {i for i in chosen if matmul.modules[i]}  # a layer may not have all
    return matmul.copies * rank * sum(matmul.inputs + matmul.modules[i] for i in chosen)


def is_trained(shape: Shape, matmul: Matmul, adapters: Adapters) -> bool:
    """Returns whether some modules of a product get adapters, or are trained in full."""
    whole = any(_selected(shape, matmul, name) for name in adapters.modules)
    return whole or matmul_elements(shape, matmul, 1, adapters) > 0


def _selected(shape: Shape, matmul: Matmul, target: str, *, unknown: Collection[int] = ()) -> Collection[int]:
    """Returns the indices of a product's modules that a name or pattern selects.

    Args:
        unknown: what a name selects that no model has.
    """
    named = OF_DELTA_NET if shape.delta_net else OF_GPT2 if shape.family == "gpt2" else MODULES
    named = OF_GATED_ATTENTION if shape.gate_apart else named
    found = [
        (product, part)
        for name, products in named.items()
        for product, part in products
        if _leaf(target) == name or ("*" in target and _matches(target, product, name))
    ]
    if not found:
        return () if _leaf(target) in (*PROJECTIONS, LAYER_INPUTS) or matmul.name in STACKED else unknown
    every = range(len(matmul.modules))
    parts = [part for product, part in found if product == matmul.name]
    return {i for part in parts for i in (every if part is None or part >= len(every) else (part,))}


def _matches(pattern: str, product: str, name: str) -> bool:
    return any(fnmatchcase(f"model.layers.0.{parent}.{name}", pattern) for parent in PARENTS.get(product, ATTENTION))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


@lru_cache(maxsize=256)
def all_whole_elements(shape: Shape, adapters: Adapters) -> int:
    """Elements of the layers that are trained in full; an embedding and a head that are tied are one layer."""
    into, head = (_names(adapters, leaves) for leaves in (EMBEDDINGS, HEADS))
    twice = whole_elements(shape, HEADS[0]) if shape.tied and into and head else 0
    return sum(whole_elements(shape, name) for name in adapters.modules) - twice


@lru_cache(maxsize=256)
def end_elements(shape: Shape, adapters: Adapters) -> tuple[int, int]:
    """Elements of the embedding and of the head that are trained in full; both are if either is and they are tied."""
    into, head = (_names(adapters, leaves) for leaves in (EMBEDDINGS, HEADS))
    if shape.tied:
        into = head = into or head
    return into * whole_elements(shape, EMBEDDINGS[0]), head * whole_elements(shape, HEADS[0])


def _names(adapters: Adapters, leaves: Collection[str]) -> bool:
    return any(_leaf(name) in leaves for name in adapters.modules)


def whole_elements(shape: Shape, name: str) -> int:
    """Returns the elements of a layer that is trained in full, over all its occurrences; 0 if its name is unknown.

    The names are those of transformers: a part of a fused layer has none. Experts are one module.
    """
    leaf = _leaf(name)
    if leaf in HEADS:
        return shape.head_matmul().parameters
    if leaf in EMBEDDINGS:
        return shape.vocabulary * (shape.embedding_width or shape.width)
    if leaf in FINAL_NORMS:
        return shape.final_norm_parameters
    return sum(
        (matmul.inputs + matmul.bias) * matmul.modules[i]
        for index in range(shape.layers)
        for matmul in shape.layer_matmuls(index)
        if matmul.name not in STACKED
        for i in _selected(shape, matmul, leaf)
    )


def virtual_elements(shape: Shape, adapters: Adapters) -> int:
    """Returns the elements of virtual tokens, or of a prefix, with their encoder."""
    hidden = adapters.width or shape.width
    keys_and_values = 2 * shape.layers * shape.key_value_width
    if adapters.encoder == "projection":
        inputs = shape.key_value_width
        network = _linear(inputs, hidden) + _linear(hidden, keys_and_values)
        return adapters.tokens * inputs + network
    if adapters.deep:
        return adapters.tokens * keys_and_values
    width = shape.embedding_width or shape.width
    tokens = adapters.tokens * width
    if adapters.encoder == "mlp":
        return tokens + _linear(width, hidden) + _linear(hidden, hidden) + _linear(hidden, width)
    if adapters.encoder == "lstm":
        lstm = sum(2 * 4 * hidden * ((width if i == 0 else 2 * hidden) + hidden + 2) for i in range(DEPTH))
        return tokens + lstm + _linear(2 * hidden, 2 * hidden) + _linear(2 * hidden, width)
    return tokens


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs
