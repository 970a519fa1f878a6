"""The job's block `train`: batch, optimizer, schedule and precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.job.block import LARGEST, Auto, Block, Fraction, NaturalInt, PositiveInt, Text


class TrainBlock(Block):
    """The training settings: batch, optimizer, schedule and precision."""

    lr: Annotated[float, Field(gt=0, lt=10)] | Auto = Field(default="auto", description="peak learning rate")
    batch: PositiveInt | Auto = Field(default="auto", description="sequences per optimizer step, over all processes")
    micro_batch: PositiveInt | Auto = Field(default="auto", description="sequences per forward pass of one process")
    accumulation: PositiveInt | Auto = Field(default="auto", description="forward passes per optimizer step")
    seq_len: Annotated[int, Field(ge=8, le=LARGEST)] | Auto = Field(
        default="auto", description="maximum sequence length in tokens"
    )
    pack: bool | Auto = Field(
        default="auto",
        description="pack several documents into one sequence of up to seq_len tokens, kept separate in attention",
    )
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = Field(
        default="adamw",
        description="adamw; muon (orthogonalised momentum for the matrices of the blocks, adamw for the rest); "
        "adafactor (no per-weight second moment); sgd (with momentum)",
    )
    optimizer_states: Literal["fp32", "bf16", "8bit"] = Field(
        default="fp32",
        description="data type of AdamW's moments: bf16 needs half of the memory, with stochastic rounding; 8bit a "
        "quarter, in blocks of 64",
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="AdamW first-moment decay, SGD momentum"
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] | Auto = Field(default="auto", description="AdamW second-moment decay")
    eps: Annotated[float, Field(gt=0)] | Auto = Field(default="auto", description="AdamW denominator term")
    schedule: Literal["linear", "cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="learning rate schedule after the warm-up; wsd: stable, then linear decay over the last fifth",
    )
    warmup: NaturalInt | Annotated[float, Field(ge=0, lt=1)] | Auto = Field(
        default="auto", description="steps of linear warm-up, or a fraction of all steps"
    )
    min_lr: Fraction = Field(default=0.0, description="final learning rate of the schedule, as a fraction of lr")
    weight_decay: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto",
        description="weight decay, on matrices only; decoupled, except for sgd, which adds it to the gradient",
    )
    clip: Annotated[float, Field(ge=0)] = Field(default=1.0, description="maximum gradient norm; 0 disables clipping")
    router_aux_loss: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto",
        description="weight of the load-balancing loss of a mixture of experts, which is computed for each document "
        "and layer, unlike in transformers; auto: the model's own (router_aux_loss_coef) where its routers are trained",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = Field(
        default="auto", description="precision of the forward pass; fp64: double precision, for verification"
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        default="none",
        description="compute the matrix products of the blocks in 8 bits, with a scale per tensor or per row",
    )
    compile: bool | Auto = Field(default="auto", description="torch.compile each block")
    deterministic: bool = Field(
        default=False, description="use deterministic kernels; an operation without one is an error"
    )
    average: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="decay of an exponential moving average of the weights, for --at average"
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard events into the run's folder")
    wandb: Text | None = Field(default=None, description="also send metrics to this project of Weights & Biases")
    mlflow: Text | None = Field(default=None, description="also send metrics to this experiment of MLflow")
