"""The job's block `data`: a source of rows, its format and its template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stoker.job.block import Auto, Block, Fraction, Text

TextFormat = Literal[
    "auto",
    "instruction",
    "messages",
    "sharegpt",
    "prompt",
    "question",
    "text",
    "preference",
    "hh_rlhf",
    "ranked",
    "scored",
    "judged",
]
LogFormat = Literal["criteo", "libsvm", "libffm"]
"""Formats of task ranking that neither a suffix nor a header identifies."""


class TemplateBlock(Block):
    """A chat template as one text for each role: ``{content}`` is the turn, ``{bos}`` and ``{eos}`` are tokens."""

    user: Text = Field(description='user turn, such as "Q: {content}\\n"')
    assistant: Text = Field(
        default="{content}",
        description='assistant turn, such as "A:\\n{content}"; the text before {content} is the generation prompt',
    )
    stop: Text = Field(default="{eos}", description='text after each answer, such as "{eos}\\n"')
    system: Text = Field(default="{content}\n\n", description="system message")
    tool: Text | None = Field(
        default=None, description="tool result; without this template, rows with tool results are dropped"
    )
    begin: Text | None = Field(default=None, description="text before the first turn, such as {bos}")


class SourceBlock(Block):
    """One source of data."""

    path: str = Field(
        min_length=1,
        description="a file, glob, folder, URL (s3://, https:// ...), hub data set id, or catalogue name; "
        ".jsonl .json .csv .parquet .txt .tar, also .gz .zst",
    )
    format: TextFormat | LogFormat = Field(
        default="auto",
        description="row format, which gives the columns their meaning; by default detected from the first rows",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="your column for each column of the format, such as {instruction: question, output: answer}",
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="share of the samples drawn from this source, relative to the other weights"
    )
    split: str | None = Field(
        default=None, description="split of a hub data set, and/or a slice: train, [:1000], train[10%:]"
    )
    template: str | TemplateBlock = Field(
        default="auto",
        description="template: auto (the tokenizer's), chatml, plain, none (no markup), a .jinja file, or a text for "
        "each role",
    )
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="variables of the template, such as {enable_thinking: false}"
    )
    train_on: Literal["all", "last", "everything"] = Field(
        default="all",
        description="trained turns of a conversation: all assistant turns, the last one, or everything with prompts",
    )
    special_tokens: Literal["auto", "text", "keep"] = Field(
        default="auto",
        description="special tokens such as <|im_end|> inside a row's content: read as text, or kept as control "
        "tokens; auto: kept in text and prompt rows",
    )
    too_long: Literal["auto", "cut", "drop", "split"] = Field(
        default="auto", description="handling of rows longer than seq_len"
    )
    max_dropped: Fraction = Field(
        default=0.1, description="refuse to train when more than this share of the rows is dropped"
    )
    stream: bool | Auto = Field(
        default="auto", description="start training before the whole source is tokenised; auto: for sources above 2 GiB"
    )
