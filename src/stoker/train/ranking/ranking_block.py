"""The keys of ``ranking:``. Every command loads this file, so its imports are light."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.job.block import Block, NaturalInt, PositiveInt, Text

NAMES = ("dlrm", "dcn", "deepfm", "wide-deep", "din", "mmoe", "two-tower")
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class FeatureBlock(Block):
    """Settings of a feature that differ from those found in the data."""

    name: Text = Field(description="its column")
    kind: Literal["auto", "dense", "buckets", "id", "ids", "sequence"] = Field(
        default="auto",
        description="dense: a number; buckets: a number by its quantile; id: one id; ids: several, added up; sequence: "
        "several in order; auto: found from the first rows",
    )
    separator: Text | None = Field(default=None, description="what is between the ids of a cell")
    buckets: Annotated[int, Field(ge=2, le=1_000_000)] = Field(default=16, description="how many buckets")
    boundaries: list[float] = Field(default_factory=list, description="between buckets, instead of quantiles")
    longest: PositiveInt = Field(default=50, description="newest ids of a sequence that are kept")
    table: Text | None = Field(default=None, description="another feature, or any name, whose rows it shares")
    width: PositiveInt | None = Field(
        default=None, description="numbers of an embedding, for it and all that share its rows; else ranking.width"
    )
    log: bool | None = Field(default=None, description="take the logarithm of a number first; found from the data")


class AdmissionBlock(Block):
    """Admission of new ids: which of them get a row."""

    count: PositiveInt = Field(default=1, description="occurrences before an id gets a row")
    probability: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="that an occurrence admits the id"
    )
    cells: PositiveInt = Field(default=262_144, description="counters of the sketch, for each of its four functions")


class EvictionBlock(Block):
    """Eviction of rows: conditions, all of which must hold, and the replacement of evicted rows."""

    age: PositiveInt | None = Field(default=None, description="steps since the id was last seen")
    every: PositiveInt = Field(default=1000, description="steps between two passes")
    frequency: PositiveInt | None = Field(default=None, description="ids that were seen less often")
    norm: Positive | None = Field(default=None, description="rows whose length is below it")
    max_rows: PositiveInt | None = Field(
        default=None, description="rows of all tables together that are kept: those of highest score"
    )
    score: Literal["norm-frequency", "frequency", "norm", "recency"] = Field(
        default="norm-frequency",
        description="norm-frequency: a row's norm times how often its id was seen; frequency: rows that were used "
        "least often go; norm: those of smallest norm; recency: those used least recently",
    )
    default_row: Literal["zeros", "mean"] = Field(
        default="zeros",
        description="what ids without a row have: zeros, or the mean of the evicted rows, by how often each was seen",
    )


class ServersBlock(Block):
    """Processes on other hosts that hold the rows: each is a `stoker table-server`."""

    addresses: Annotated[list[Text], Field(min_length=1)] = Field(description="HOST:PORT of every server")
    secret: Text = Field(description="a file with the secret that servers and trainers share")
    staleness: NaturalInt = Field(default=0, description="steps at most that a lookup may lack; 0: none")
    patience: Positive = Field(default=300.0, description="seconds that a lost server gets to return")


class TableBlock(Block):
    """The tables of embeddings and their optimizer."""

    optimizer: Literal["rowwise-adagrad", "adagrad", "adam", "ftrl", "sgd"] = Field(
        default="rowwise-adagrad", description="steps the rows that a step has looked up"
    )
    lr: Positive = Field(default=0.03, description="its peak learning rate; it follows train.schedule")
    eps: Positive = Field(default=1e-8, description="denominator term of Adagrad and Adam")
    initial: NotNegative = Field(default=0.0, description="first value of Adagrad's and FTRL's sums of squares")
    l1: NotNegative = Field(default=0.0, description="of FTRL")
    l2: NotNegative = Field(default=0.0, description="of FTRL")
    weight_decay: NotNegative = Field(default=0.0, description="added to the gradients of rows that are updated")
    dtype: Literal["float32", "float16", "int8"] = Field(default="float32", description="of stored rows")
    rows: PositiveInt | None = Field(
        default=None, description="rows of each table with `engine: torchrec`, to which ids are hashed"
    )
    init_scale: NotNegative = Field(default=0.01, description="first values lie between its negative and itself")
    memory_rows: PositiveInt | None = Field(
        default=None, description="rows that a process keeps in memory; the others lie in a file"
    )
    admission: AdmissionBlock | None = Field(default=None, description="which new ids get a row")
    eviction: EvictionBlock | None = Field(default=None, description="which rows are deleted")


class RankingBlock(Block):
    """``task: ranking``: a model that scores rows of a click log."""

    label: Text | list[Text] = Field(default="label", description="column of the label, or a list of them")
    positive: float | None = Field(default=None, description="value from which on a label is positive")
    model: Text = Field(
        default="dlrm", description=f"{', '.join(NAMES)}, or your own as package.module:name, called with the shape"
    )
    engine: Literal["stoker", "torchrec"] = Field(
        default="stoker",
        description="what holds the rows: Stoker's growing tables, or TorchRec's of a fixed size, "
        "to whose rows ids are hashed",
    )
    width: PositiveInt = Field(default=16, description="numbers of an embedding")
    hidden: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        default=[128, 64], description="widths of a tower's hidden layers"
    )
    layers: PositiveInt = Field(default=3, description="cross layers of dcn")
    experts: PositiveInt = Field(default=4, description="experts of mmoe")
    time: Text | None = Field(default=None, description="column of the time; found by its name unless given")
    group: Text | None = Field(
        default=None, description="column by which rankings are compared, such as the user; found unless given"
    )
    weight: Text | None = Field(default=None, description="column of the rows' weights in the loss")
    item: list[Text] = Field(default_factory=list, description="features of the item, its id first; for two-tower")
    features: list[FeatureBlock] = Field(default_factory=list, description="features that are not as they are found")
    ignore: list[Text] = Field(default_factory=list, description="columns that are no features")
    crosses: list[list[Text]] = Field(default_factory=list, description="pairs of features that are a feature together")
    slices: list[Text] = Field(default_factory=list, description="columns by whose values metrics are given as well")
    at: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        default=[10], description="sizes k of NDCG and recall"
    )
    progressive: bool = Field(
        default=False, description="rows in order of time; each day is evaluated before it is trained on"
    )
    table: TableBlock = Field(default_factory=TableBlock, description="the tables of embeddings")
    servers: ServersBlock | None = Field(default=None, description="processes on other hosts that hold the rows")


REASONS = {
    "label": "the usual name",
    "positive": "labels are 0 and 1",
    "model": "the usual reference",
    "engine": "no ids share a row, and nothing more is to be installed",
    "width": "enough for most ids",
    "hidden": "small beside the tables",
    "layers": "as in the paper's experiments",
    "experts": "few labels share them",
    "time": "found by its name, else the order of the rows",
    "group": "found by its name",
    "weight": "all rows weigh alike",
    "item": "no other model needs to know",
    "features": "found from the first rows; `stoker data` shows them",
    "features.kind": "found from the first rows",
    "features.separator": "lists need none; found in texts where it is |",
    "features.buckets": "enough for a smooth curve",
    "features.boundaries": "quantiles of the training part",
    "features.longest": "older ones say little",
    "features.table": "a table of its own; a sequence shares that of its item where its name says so",
    "features.width": "all embeddings have as many numbers",
    "features.log": "where a few numbers are far larger than the others",
    "ignore": "every column is a feature",
    "crosses": "none unless asked for",
    "slices": "all rows together",
    "at": "the usual size",
    "progressive": "rows are shuffled, and the latest are held out",
    "table.optimizer": "steps by how often a row was seen, and one number a row remembers it",
    "table.lr": "the best of 0.01 to 0.2 on MovieLens-100K",
    "table.eps": "the usual choice",
    "table.initial": "a new row moves by the whole rate in its first step",
    "table.l1": "no row is drawn to zero",
    "table.l2": "no row is drawn to zero",
    "table.weight_decay": "no row is drawn to zero",
    "table.dtype": "exact",
    "table.rows": "100,000 with `engine: torchrec`",
    "table.init_scale": "near zero, so that a new id says nothing",
    "table.memory_rows": "all rows are in memory",
    "table.admission": "every id has a row from the start",
    "table.admission.count": "no occurrence is waited for",
    "table.admission.probability": "every occurrence counts",
    "table.admission.cells": "few collisions up to a hundred thousand waiting ids",
    "table.eviction": "no row is deleted",
    "table.eviction.age": "a table's size says which rows go",
    "table.eviction.every": "a pass reads all rows",
    "table.eviction.frequency": "however often",
    "table.eviction.norm": "however long",
    "table.eviction.max_rows": "a row's age says whether it goes",
    "table.eviction.score": "half of MovieLens-100K's rows cost 0.002 AUC, by frequency 0.016",
    "table.eviction.default_row": "the mean changes the AUC of MovieLens-100K by less than 0.0003",
    "servers": "the processes that train hold the rows",
    "servers.staleness": "the same losses as without servers",
    "servers.patience": "a host may have to start again",
}
EXAMPLES = {
    "hidden": "[128, 64]",
    "at": "[10]",
    "positive": "4",
    "time": "timestamp",
    "group": "user_id",
    "weight": "weight",
    "item": "[item_id]",
    "ignore": "[comment]",
    "crosses": "[[user_id, genre]]",
    "slices": "[device]",
    "features.name": "genres",
    "features.separator": '"|"',
    "features.boundaries": "[18, 30, 50]",
    "features.table": "item_id",
    "features.width": "32",
    "features.log": "true",
    "table.memory_rows": "1000000",
    "table.rows": "1000000",
    "table.eviction.age": "10000",
    "servers.addresses": '["10.0.0.7:29500"]',
    "servers.secret": "run.secret",
    "table.eviction.frequency": "2",
    "table.eviction.norm": "0.01",
    "table.eviction.max_rows": "1000000",
}
