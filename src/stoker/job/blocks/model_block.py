"""The job's block `model`: the sources of weights and tokenizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stoker.job.block import Block, Text


class SpecialTokensBlock(Block):
    """Special tokens by their role; those that the tokenizer lacks are added, with new rows in the model."""

    bos: Text | None = Field(default=None, description="token that begins a text")
    eos: Text | None = Field(default=None, description="token that ends a text and an answer; the same as model.stop")
    pad: Text | None = Field(default=None, description="token that pads short rows")
    unk: Text | None = Field(default=None, description="token for unknown text")
    additional: list[Text] = Field(
        default_factory=list, description="additional special tokens, such as [<|im_start|>]"
    )


class ModelBlock(Block):
    """The model to train, and the sources of its weights and tokenizer."""

    name: str = Field(
        min_length=1,
        description="hub id (org/name), folder or .gguf file, local or at a URL, or a name from the offline catalogue",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id")
    tokenizer: str | None = Field(
        default=None,
        description="another tokenizer: hub id, folder, URL or catalogue name; by default the model's own",
    )
    stop: Text | Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None,
        description="token that ends an answer, or a list of them; by default the tokenizer's end token",
    )
    special_tokens: SpecialTokensBlock | None = Field(
        default=None, description="special tokens by role, or a list of additional ones; new tokens are added"
    )
    weights: Literal["stored", "random"] = Field(
        default="stored", description="initial weights: stored in the model's files, or random by its family's rule"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="changed keys of the model's config.json, such as {num_hidden_layers: 12}",
    )
    quantise: Literal["none", "8bit", "4bit", "int8", "int4"] = Field(
        default="none",
        description="quantise the frozen base to 8 or 4 bits (bitsandbytes), or to int8 or int4 (torchao); training "
        "needs an adapter",
    )
    trust_remote_code: bool = Field(default=False, description="run modelling code that comes with the model")
    allow_pickle: bool = Field(default=False, description="load pickled weights (.bin, .pt), which can run code")

    def of_other(self, name: str) -> ModelBlock:
        """Returns the block of another model with the settings that do not belong to this one alone."""
        return ModelBlock(
            name=name,
            quantise=self.quantise,
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
        )
