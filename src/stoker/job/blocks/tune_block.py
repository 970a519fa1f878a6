"""The job's block `tune`: the tuning method."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.job.block import Auto, Block, NaturalInt, PositiveInt


class TuneBlock(Block):
    """The tuning method: which parameters are trained."""

    method: Literal["full", "lora", "qlora", "prefix", "prompt", "p-tuning"] = Field(
        default="full",
        description="full; lora; qlora (lora on a 4-bit base); prefix (trained keys and values before those of every "
        "layer); prompt (trained embeddings before the input); p-tuning (the same, computed by an "
        "encoder)",
    )
    new_rows_first: NaturalInt = Field(
        default=0,
        description="number of first steps that train only the embeddings of newly added tokens",
    )
    rank: PositiveInt = Field(default=16, description="rank of the LoRA matrices")
    alpha: Annotated[float, Field(gt=0)] | Auto = Field(default="auto", description="LoRA scaling numerator")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="dropout before the LoRA matrices"
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="linear layers that get an adapter, by name or pattern (*.self_attn.*), or all-linear",
    )
    layers: str | Literal["all"] = Field(
        default="all", description="blocks that get an adapter, counted from 0: all, or ranges such as 0-3,20-"
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="layers trained in full beside the adapter, such as lm_head"
    )
    loraplus_ratio: Annotated[float, Field(ge=1.0)] = Field(
        default=1.0, description="ratio of the second LoRA matrix's learning rate to the first's (LoRA+)"
    )
    rslora: bool = Field(
        default=False, description="scale by alpha/sqrt(rank) instead of alpha/rank (rank-stabilised LoRA)"
    )
    dora: bool = Field(default=False, description="train magnitude and direction separately (DoRA)")
    tokens: PositiveInt = Field(default=20, description="number of virtual tokens before every sequence")
    text: str | None = Field(
        default=None,
        description="text whose embeddings initialise the virtual tokens of `prompt`; by default random words, drawn "
        "by seed",
    )
    projection: bool = Field(
        default=True, description="compute the prefix with a two-layer network, which is dropped after training"
    )
    deep: bool = Field(default=False, description="p-tuning: virtual tokens in every layer, no encoder (P-tuning v2)")
    encoder: Literal["mlp", "lstm"] = Field(
        default="mlp", description="network that computes the virtual tokens of p-tuning"
    )
    width: PositiveInt | Auto = Field(
        default="auto", description="width of the hidden layer of the encoder or the projection"
    )
