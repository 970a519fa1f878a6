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

from stoker.job.tune_keys import ADAPTERS
from stoker.plan.matmul import STACKED, Matmul
from stoker.plan.shape import Shape

Tuning = Literal["full", "lora", "qlora", "prefix", "prompt", "p-tuning"]
Encoder = Literal["none", "mlp", "lstm", "projection"]
DEPTH = 2  # layers of the encoder's LSTM

# Products by the names that models have for their modules, and which of a product's parts: see `Matmul`.
ATTENTION = ("self_attn", "attn", "attention", "self_attention")
INTO = ("qkv", "query up", "query down", "key-value up", "key-value down")
MODULES: dict[str, tuple[tuple[str, int | None], ...]] = {
    **dict.fromkeys(("q_proj", "query"), (("qkv", 0), ("query up", None))),
    **dict.fromkeys(("k_proj", "key"), (("qkv", 1),)),
    **dict.fromkeys(("v_proj", "value"), (("qkv", 2),)),
    **dict.fromkeys(("c_attn", "query_key_value", "qkv_proj", "Wqkv"), (("qkv", None),)),
    **dict.fromkeys(("o_proj", "out_proj", "dense"), (("attention output", None),)),
    **dict.fromkeys(("c_fc", "fc1", "fc_in", "dense_h_to_4h", "gate_up_proj"), (("up", None),)),
    "gate_proj": (("up", 0),),
    "up_proj": (("up", 1),),
    **dict.fromkeys(("down_proj", "fc2", "fc_out", "dense_4h_to_h"), (("down", None),)),
    "c_proj": (("down", None),),
}
HEADS = ("lm_head", "embed_out", "output")
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
    return sum(
        matmul_elements(shape, matmul, rank, adapters)
        for index in blocks
        if index < shape.layers
        for matmul in shape.layer_matmuls(index)
    )


def matmul_elements(shape: Shape, matmul: Matmul, rank: int, adapters: Adapters = PLAIN) -> int:
    """Elements of the low-rank matrices on one product, where its block has some."""
    if adapters.targets is None:
        return 0 if matmul.name in STACKED else matmul.lora_parameters(rank)
    parts = matmul.parts or (matmul.outputs,)
    wanted = [
        range(len(parts)) if part is None or part >= len(parts) else (part,)
        for target in adapters.targets
        for name, part in _products(shape, target)
        if name == matmul.name
    ]
    chosen = {part for found in wanted for part in found}
    return matmul.copies * rank * sum(matmul.inputs + parts[part] for part in chosen)


def _products(shape: Shape, target: str) -> tuple[tuple[str, int | None], ...]:
    """Returns the products selected by a module's name or pattern; all if it selects none that is known."""
    found: list[tuple[str, int | None]] = []
    modules = MODULES
    if shape.family == "gpt2":
        modules = MODULES | {"c_proj": (("attention output", None), ("down", None))}
    for name, products in modules.items():
        parents = ATTENTION if products[0][0] in (*INTO, "attention output") else ("mlp",)
        paths = [f"model.layers.0.{parent}.{name}" for parent in parents]
        if target.rsplit(".", 1)[-1] == name or ("*" in target and any(fnmatchcase(p, target) for p in paths)):
            found += products
    return tuple(found) or (*((name, None) for name in INTO), ("attention output", None), ("up", None), ("down", None))


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
    return any(name.rsplit(".", 1)[-1] in leaves for name in adapters.modules)


def whole_elements(shape: Shape, name: str) -> int:
    """Returns the elements of a layer that is trained in full, over all its occurrences; 0 if its name is unknown.

    peft trains a copy, so a tied head counts as well, and matches every layer whose name ends with it: ``norm``
    includes the norms of LLaMA's blocks. A part of a fused layer counts as the whole layer.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf in HEADS:
        return shape.head_matmul().parameters
    if leaf in EMBEDDINGS:
        return shape.vocabulary * (shape.embedding_width or shape.width)
    if leaf in FINAL_NORMS:
        ends_so = leaf == "norm" and shape.norm == "rms"
        return shape.final_norm_parameters + ends_so * sum(shape.vectors(shape.layer(i)) for i in range(shape.layers))
    if leaf not in MODULES:
        return 0
    return sum(
        matmul.held if part is None or part >= len(matmul.parts) else matmul.inputs * matmul.parts[part]
        for index in range(shape.layers)
        for matmul in shape.layer_matmuls(index)
        for product, part in _products(shape, leaf)
        if product == matmul.name
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
