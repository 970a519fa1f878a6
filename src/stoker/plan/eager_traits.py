"""Traits of the code of a family of models that change its memory and time.

Read from transformers 5, in the form in which Stoker trains a model (fused layers split, attention by one interface).
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.plan.shape import Shape


@dataclass(frozen=True)
class EagerTraits:
    """Traits in which a family's code differs from the most common.

    Attributes:
        nonlinearity: tensors of the MLP's width that a plain MLP saves. 2: the input and output of a fused GELU. 5: its
            gate and the other factor also bounded, the gate's sigmoid, and one added to the other factor.
        backward: tensors of the MLP's width that the backward pass of a plain MLP's nonlinearity has at once, less
            those that are freed by then. 5: the formula written out.
        norm: tensors that a norm saves in addition to its output, one fewer if its weight is frozen; 0 for the default
            of its kind.
        exact_norm: whether a norm multiplies with its weight in float32, and saves the normalised values in it.
        one_qkv: whether one product makes queries, keys and values, in Stoker's form of the model too.
        rotary: whether queries and keys are rotated, which creates new tensors in addition to the product's output.
        softcap: whether scores are capped, which no fused kernel of PyTorch supports on a CPU.
        alibi: whether a bias of each head is added to the scores, on a CPU in a mask of the whole row.
        packed: whether documents share a row; if not, attention gets a mask.
        drops_scores: whether a model with dropout on hidden states also has dropout on scores.
    """

    nonlinearity: int = 2
    backward: int = 2
    norm: int = 0
    exact_norm: bool = False
    one_qkv: bool = False
    rotary: bool = True
    softcap: bool = False
    alibi: bool = False
    packed: bool = True
    drops_scores: bool = False


CODES = {
    "gpt2": EagerTraits(rotary=False, drops_scores=True),
    "gpt_neo": EagerTraits(rotary=False),
    "opt": EagerTraits(nonlinearity=1, rotary=False),  # ReLU's backward pass needs its result only
    "bloom": EagerTraits(backward=5, one_qkv=True, rotary=False, alibi=True),
    "gpt_oss": EagerTraits(nonlinearity=5),
    "gpt_neox": EagerTraits(one_qkv=True),
    "falcon": EagerTraits(one_qkv=True, packed=False),
    "cohere": EagerTraits(norm=3),  # the deviations from the mean, twice, and the normalised values
    "gemma": EagerTraits(exact_norm=True),
    "gemma2": EagerTraits(exact_norm=True, softcap=True),
    **dict.fromkeys(("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), EagerTraits(exact_norm=True)),
}


def code_of(shape: Shape) -> EagerTraits:
    """Traits of the shape's family; the most frequent ones for an unknown family."""
    return CODES.get(shape.family, EagerTraits())
