"""The shape of a decoder: the architecture of a model as a plan needs it, counted without weights.

Numbers of parameters are exact: they are those of the models' own code for every family that
`stoker.plan.shapes` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from stoker.plan.layer import DeltaNet, ExpertMixture, Indexer, Latent, Layer, LayerSizes, StateSpace
from stoker.plan.matmul import (
    Matmul,
    attention_matmuls,
    delta_net_matmuls,
    indexer_matmuls,
    input_matmuls,
    mixture_matmuls,
    mlp_matmuls,
    state_space_matmuls,
)

__all__ = ["DeltaNet", "ExpertMixture", "Indexer", "Latent", "Layer", "LayerSizes", "Shape", "StateSpace"]


@dataclass(frozen=True)
class Shape:
    """The architecture of a decoder (or of an encoder and a decoder, as one stack).

    Attributes:
        name: of the model or the family.
        layers, width, heads, kv_heads, head_size: of the stack and its attention.
        value_size: of a head's values, if it is not ``head_size``; else 0.
        mlp_width: of a dense layer's MLP.
        vocabulary: rows of the embedding.
        gated: whether MLPs have a gate.
        tied: whether the head is the embedding.
        scored: whether the head gives one score instead of the logits.
        positions: rows of a learnt table of positions; 0 for none.
        embedding_width: of the embedding if it is projected to ``width``; 0 if it has that width.
        output_gate: whether the product of the queries also gives a gate of attention's result.
        gate_apart: whether the gate has a module of its own.
        qkv_bias, output_bias, mlp_bias, head_bias: whether these products add a bias.
        norm, norm_bias: kind of the norms, and whether they have a bias as well as a weight.
        norms: number of norms over the hidden states in a layer.
        query_key_norm: norms of queries and keys: of each head, or of the width of all heads.
        embedding_norm, final_norms: norms after the embedding, and after the last layer.
        fused_qkv, fused_gate: whether these products are one module each in the model's checkpoint.
        splits_fused: whether Stoker splits such modules when it builds the model, see `Matmul.parts`.
        parallel_residual: whether attention and MLP read the same input.
        dropout: whether hidden states have dropout, so that their masks are saved for the backward pass.
        mixture, latent, state_space, delta_net: a sparse mixture, latent attention, a Mamba-2 mixer, linear attention.
        indexer: selects the keys of latent attention.
        pattern: the parts of each layer; empty if all are alike.
        layer_input_width: of the embedding of each token in every layer (Gemma 4); 0 for none.
        one_stage: whether layers read what earlier ones have computed, so that the model cannot be cut into stages.
        layer_vectors: further elements of each layer that has attention.
        outside_vectors: further elements outside the layers.
        family: transformers' ``model_type``, whose code computes it; empty if it is unknown.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    vocabulary: int
    value_size: int = 0
    gated: bool = False
    tied: bool = True
    positions: int = 0
    embedding_width: int = 0
    output_gate: bool = False
    gate_apart: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_bias: bool = False
    norms: int = 2
    query_key_norm: Literal["none", "head", "width"] = "none"
    embedding_norm: bool = False
    final_norms: int = 1
    fused_qkv: bool = False
    fused_gate: bool = False
    splits_fused: bool = False
    parallel_residual: bool = False
    dropout: bool = False
    mixture: ExpertMixture | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    state_space: StateSpace | None = None
    delta_net: DeltaNet | None = None
    pattern: tuple[Layer, ...] = ()
    layer_input_width: int = 0
    one_stage: bool = False
    layer_vectors: int = 0
    outside_vectors: int = 0
    family: str = ""
    scored: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of a few sizes: shapes are looked up in caches often."""
        return hash((self.name, self.layers, self.width, self.mlp_width, self.vocabulary))

    @property
    def most_tensor(self) -> int:
        """The most processes of `tensor`: each has some of the key heads."""
        return min(self.kv_heads, self.delta_net.key_heads) if self.delta_net else self.kv_heads

    @property
    def query_width(self) -> int:
        """Width of all heads' queries."""
        per_head = self.latent.content_size + self.latent.rotary_size if self.latent else self.head_size
        return self.heads * per_head

    @property
    def key_value_width(self) -> int:
        """Width of the keys, or of the values, of all key-value heads."""
        return self.kv_heads * self.head_size

    @property
    def value_width(self) -> int:
        """Width of the output product's input: a value for each head of the queries."""
        return self.heads * (self.latent.value_size if self.latent else self.value_size or self.head_size)

    def layer(self, index: int) -> Layer:
        """Returns the parts of the layer at an index (from 0)."""
        if self.pattern:
            return self.pattern[index]
        return Layer(feed_forward="experts" if self.mixture else "dense")

    def layer_matmuls(self, index: int) -> tuple[Matmul, ...]:
        """Returns the matrix products of the layer at an index, in the order of its computation."""
        return self._matmuls[self.layer(index)]

    def matmuls(self, layer: Layer) -> tuple[Matmul, ...]:
        """Returns the matrix products of a kind of layer that the model has."""
        return self._matmuls[layer]

    @cached_property
    def _matmuls(self) -> dict[Layer, tuple[Matmul, ...]]:
        """The matrix products of each kind of layer, cached, as there are few kinds."""
        return {layer: self._matmuls_of(layer) for layer in {self.layer(i) for i in range(self.layers)}}

    def _matmuls_of(self, layer: Layer) -> tuple[Matmul, ...]:
        matmuls = attention_matmuls(self, layer.sizes) * layer.attentions
        if layer.indexed and self.indexer is not None and self.latent is not None:
            matmuls += indexer_matmuls(self, self.indexer, self.latent)
        if layer.state_space and self.state_space is not None:
            matmuls += state_space_matmuls(self, self.state_space)
        if layer.linear and self.delta_net is not None:
            matmuls += delta_net_matmuls(self, self.delta_net)
        if layer.feed_forward == "experts" and self.mixture is not None:
            matmuls += mixture_matmuls(self, self.mixture)
        elif layer.feed_forward == "dense":
            matmuls += mlp_matmuls(self, layer.sizes.mlp_width if layer.sizes else self.mlp_width, inputs=self.width)
        return matmuls + (input_matmuls(self) if self.layer_input_width else ())

    def head_matmul(self) -> Matmul:
        """Returns the product of the logits: with the embedding's own matrix where that is tied."""
        return Matmul("head", self.embedding_width or self.width, self.outputs, "column", bias=self.head_bias)

    @property
    def outputs(self) -> int:
        """Outputs of the head for a token."""
        return 1 if self.scored else self.vocabulary

    def layer_parameters(self, index: int) -> int:
        """Elements of the layer at an index: its matrices, their biases and its norms."""
        return self._counts[self.layer(index)][0]

    def active_layer_parameters(self, index: int) -> int:
        """Elements of the layer at an index that one token meets: of its experts only those chosen."""
        return self._counts[self.layer(index)][1]

    @cached_property
    def _counts(self) -> dict[Layer, tuple[int, int]]:
        """Returns all and active elements of each kind of layer."""
        return {
            layer: (
                sum(matmul.parameters for matmul in matmuls) + self.vectors(layer),
                sum(matmul.active_parameters for matmul in matmuls) + self.vectors(layer),
            )
            for layer, matmuls in self._matmuls.items()
        }

    def vectors(self, layer: Layer) -> int:
        """Returns the elements of a layer that belong to no matrix and no matrix's bias."""
        crossing = max(layer.attentions - 1, 0)
        vectors = (self.norms + crossing) * self.norm_parameters(self.width)
        if layer.attentions:
            vectors += self.layer_vectors + (layer.sizes.sinks if layer.sizes else 0)
            if self.query_key_norm == "head":
                sizes = layer.sizes or LayerSizes(self.kv_heads, self.head_size, self.mlp_width)
                vectors += (1 if sizes.projects == "q" else 2) * self.norm_parameters(sizes.head_size)
            elif self.query_key_norm == "width":
                vectors += self.norm_parameters(self.query_width) + self.norm_parameters(self.key_value_width)
            if self.latent is not None:
                vectors += self.latent.query_rank + self.latent.key_value_rank
            if layer.indexed and self.indexer is not None:
                vectors += 2 * self.indexer.size  # the norm of its keys
        if layer.state_space and self.state_space is not None:
            vectors += self.state_space.vectors
        if layer.linear and self.delta_net is not None:
            vectors += self.delta_net.vectors
        return vectors

    def norm_parameters(self, width: int) -> int:
        """Elements of a norm of a width."""
        return width * (2 if self.norm_bias else 1)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding and of the positions' table, with their projections and norms."""
        token = self.embedding_width or self.width
        projection = self.width * self.embedding_width
        norm = self.norm_parameters(self.width) * self.embedding_norm
        return self.vocabulary * token + projection + self.positions * self.width + norm

    @property
    def head_parameters(self) -> int:
        """Elements of the head, without the embedding's where that is tied."""
        matrix = 0 if self.tied else self.head_matmul().inputs * self.outputs
        return matrix + self.width * self.embedding_width + self.outputs * self.head_bias

    @property
    def final_norm_parameters(self) -> int:
        """Elements of the norms behind the last layer."""
        return self.final_norms * self.norm_parameters(self.width)

    @property
    def outside_parameters(self) -> int:
        """Elements outside the layers, each counted once."""
        return self.embedding_parameters + self.head_parameters + self.final_norm_parameters + self.outside_vectors

    @cached_property
    def parameters(self) -> int:
        """The number of all elements, a shared one counted once."""
        return self.outside_parameters + sum(map(self.layer_parameters, range(self.layers)))

    @cached_property
    def active_parameters(self) -> int:
        """The number of elements without those of experts that a token is not routed to."""
        return self.outside_parameters + sum(map(self.active_layer_parameters, range(self.layers)))

    def with_layers(self, layers: int) -> Shape:
        """Returns the model with another number of layers.

        It keeps the fraction of dense layers before those with experts, and at least one of them.
        """
        if not self.pattern or layers == self.layers:
            return replace(self, layers=layers)
        leading = next((i for i, layer in enumerate(self.pattern) if layer.feed_forward != "dense"), 0)
        kept = min(max(1, round(leading * layers / self.layers)), layers) if leading else 0
        rest = self.pattern[leading:]
        pattern = self.pattern[:kept] + tuple(rest[i % len(rest)] for i in range(layers - kept))
        return replace(self, layers=layers, pattern=pattern)
