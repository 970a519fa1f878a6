"""The parts of a layer: attention, linear attention, an MLP or a mixture of experts, a state space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer that may differ from those of the model (Gemma 4, MiMo).

    Attributes:
        kv_heads, head_size: of its attention.
        mlp_width: of its dense MLP.
        sinks: learnt logits of attention, one for each head.
        projects: products of its input: queries, keys and values; keys that are values as well; queries alone, where
            keys and values are those of an earlier layer.
    """

    kv_heads: int
    head_size: int
    mlp_width: int
    projects: Literal["qkv", "qk", "q"] = "qkv"
    sinks: int = 0


@dataclass(frozen=True)
class Layer:
    """The parts of one layer.

    Attributes:
        attentions: 1; 2 with cross-attention, 0 for none.
        feed_forward: an MLP, a sparse mixture, or none.
        state_space: whether there is a Mamba-2 mixer.
        linear: whether there is linear attention.
        window: tokens that each token attends to, itself among them; 0 for all.
        sizes: those that may differ from the model's; None for the model's.
        indexed: whether attention has an indexer, if the model has any.
    """

    attentions: int = 1
    feed_forward: Literal["dense", "experts", "none"] = "dense"
    state_space: bool = False
    linear: bool = False
    window: int = 0
    sizes: LayerSizes | None = None
    indexed: bool = True


@dataclass(frozen=True)
class ExpertMixture:
    """A sparse mixture of experts.

    Attributes:
        experts: routed ones in a layer.
        per_token: of these, how many each token goes to (top k).
        width: of an expert's MLP.
        shared_width: of the MLP of all experts that every token goes through; 0 for none.
        router_bias: whether the router adds a learnt bias.
        shared_gate: whether the shared experts' output is scaled by a learnt gate.
        latent_width: of the space that the routed experts work in; 0 if it is the hidden one.
    """

    experts: int
    per_token: int
    width: int
    shared_width: int = 0
    router_bias: bool = False
    shared_gate: bool = False
    latent_width: int = 0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI, 2024, section 2.1).

    Attributes:
        query_rank: of the compressed queries; 0 where queries are not compressed.
        key_value_rank: of the compressed keys and values.
        content_size, rotary_size: of a head's queries and keys: the parts without and with rotary positions.
        value_size: of a head's values.
    """

    query_rank: int
    key_value_rank: int
    content_size: int
    rotary_size: int
    value_size: int


@dataclass(frozen=True)
class Indexer:
    """Selects the keys that each query attends to, by products of its own (DeepSeek-AI, 2025, section 2.1).

    Attributes:
        heads, size: of its queries; there is one head of keys.
        keys: selected for each query.
    """

    heads: int
    size: int
    keys: int


@dataclass(frozen=True)
class StateSpace:
    """A Mamba-2 mixer (Dao and Gu, 2024): heads of a size, groups that share state matrices, a short convolution."""

    heads: int
    head_size: int
    groups: int
    state: int
    kernel: int = 4

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_size

    @property
    def vectors(self) -> int:
        """Elements that are in no matrix: convolution, decay, skip, step bias and norm."""
        channels = self.inner + 2 * self.groups * self.state
        return channels * (self.kernel + 1) + 3 * self.heads + self.inner


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention by the gated delta rule (Yang et al., 2025), behind a short convolution.

    Attributes:
        key_heads, key_size: of queries and keys.
        value_heads, value_size: of values; each key head serves a group of value heads.
        kernel: of the convolution of queries, keys and values.
        one_product: whether one product gives queries, keys, values and their gate, and another both decays.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    one_product: bool = False

    @property
    def key_width(self) -> int:
        """Width of all heads' queries, or keys."""
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Width of all heads' values."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> int:
        """Elements of the state: a matrix for each value head."""
        return self.value_heads * self.key_size * self.value_size

    @property
    def vectors(self) -> int:
        """Elements that are in no matrix: convolution, decay, step bias and norm."""
        return self.channels * self.kernel + 2 * self.value_heads + self.value_size

    @property
    def forward_flop(self) -> int:
        """FLOP of the rule for one token, in chunks (Yang et al., 2024, section 3.2): products of keys with keys and
        queries, and of their results with keys and values, within a chunk, and three products with the state.
        """
        within = RULE_CHUNK * (5 * self.key_size + 3 * self.value_size)
        return self.value_heads * within + 6 * self.state


RULE_CHUNK = 64  # tokens that the delta rule computes at once
