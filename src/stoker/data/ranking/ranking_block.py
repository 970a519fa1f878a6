"""The keys of ``ranking:``. Every command loads this file, so its imports are light."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.data.ranking.features import Kind
from stoker.job.block import Block, NaturalInt, PositiveInt, Text

IN_BATCH = "in-batch-softmax"  # the loss of `two-tower` over the items of a step
NAMES = ("dlrm", "dcn", "deepfm", "wide-deep", "din", "mmoe", "ple", "esmm", "two-tower")
# Kinds of features that use a key of `features`; the first is the one to suggest.
KINDS_OF_KEYS: dict[str, tuple[Kind, ...]] = {
    "separator": ("ids", "sequence"),
    "buckets": ("buckets",),
    "boundaries": ("buckets",),
    "longest": ("sequence",),
    "table": ("id", "ids", "sequence", "buckets"),
    "width": ("id", "ids", "sequence", "buckets"),
    "log": ("dense",),
}
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class FeatureBlock(Block):
    """Settings of a feature that differ from those found in the data."""

    name: Text = Field(description="column of the feature")
    kind: Literal["auto", "dense", "buckets", "id", "ids", "sequence"] = Field(
        default="auto",
        description="dense: a number; buckets: a number by its quantile; id: one id; ids: several, by the "
        "mean of their rows; sequence: several in order; auto: found from the first rows",
    )
    separator: Text | None = Field(default=None, description="separator between the ids of a cell")
    buckets: Annotated[int, Field(ge=2, le=1_000_000)] | None = Field(
        default=None, description="number of buckets; implies `kind: buckets`"
    )
    boundaries: list[float] = Field(
        default_factory=list, description="boundaries between buckets, instead of quantiles; implies `kind: buckets`"
    )
    longest: PositiveInt | None = Field(
        default=None, description="maximum length of a sequence; the newest ids are kept"
    )
    table: Text | None = Field(
        default=None,
        description="another feature to share rows with, a name that several features give, or its own name",
    )
    width: PositiveInt | None = Field(
        default=None,
        description="embedding dimension of the feature and of all that share its rows; by default ranking.width",
    )
    log: bool | None = Field(
        default=None, description="take the logarithm of the number first; by default decided from the data"
    )


class AdmissionBlock(Block):
    """Admission of new ids: which of them get a row."""

    count: PositiveInt = Field(default=1, description="number of occurrences before an id gets a row")
    probability: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="probability that an occurrence admits the id"
    )
    cells: PositiveInt = Field(
        default=262_144, description="counters of the sketch for each of its four hash functions"
    )


class EvictionBlock(Block):
    """Eviction of rows: conditions, all of which must hold, and the replacement of evicted rows."""

    age: PositiveInt | None = Field(default=None, description="evict ids that were not seen for this number of steps")
    every: PositiveInt = Field(default=1000, description="steps between two eviction passes")
    frequency: PositiveInt | None = Field(default=None, description="evict ids that were seen less often than this")
    norm: Positive | None = Field(default=None, description="evict rows whose norm is below this")
    max_rows: PositiveInt | None = Field(
        default=None, description="number of rows of all tables together that are kept, those of the highest score"
    )
    score: Literal["norm-frequency", "frequency", "norm", "recency"] = Field(
        default="norm-frequency",
        description="norm-frequency: norm of a row times how often its id was seen; frequency: how often it was "
        "used; norm: its norm; recency: how recently it was used; rows of the lowest score are evicted",
    )
    default_row: Literal["zeros", "mean"] = Field(
        default="zeros",
        description="embedding of ids without a row: zeros, or the mean of the evicted rows, weighted by how often "
        "each was seen",
    )


class LogQBlock(Block):
    """Correction of the in-batch softmax for items that are in many batches (Yi et al., 2019)."""

    enabled: bool = Field(
        default=True, description="subtract from each logit the logarithm of how often its item is in a batch"
    )
    cells: PositiveInt = Field(
        default=262_144, description="number of cells that estimate how often items are in a batch; ids are hashed"
    )
    rate: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.05, description="weight of the newest gap between two batches with an item in its mean gap"
    )


class ServersBlock(Block):
    """Processes on other hosts that hold the rows: each is a `stoker table-server`."""

    addresses: Annotated[list[Text], Field(min_length=1)] = Field(description="HOST:PORT of each server")
    secret: Text = Field(description="file with the secret that servers and trainers share")
    staleness: NaturalInt = Field(
        default=0, description="maximum number of steps whose updates a lookup may miss; 0: none"
    )
    patience: Positive = Field(default=300.0, description="seconds to wait for a lost server to return")


class TableBlock(Block):
    """The tables of embeddings and their optimizer."""

    optimizer: Literal["rowwise-adagrad", "adagrad", "adam", "ftrl", "sgd"] = Field(
        default="rowwise-adagrad", description="optimizer of the rows that a step has looked up"
    )
    lr: Positive = Field(default=0.03, description="peak learning rate of the tables; it follows train.schedule")
    eps: Positive = Field(default=1e-8, description="denominator term of Adagrad and Adam")
    initial: NotNegative = Field(default=0.0, description="initial value of Adagrad's and FTRL's sums of squares")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="first-moment decay of Adam")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.999, description="second-moment decay of Adam")
    ftrl_beta: Positive = Field(default=1.0, description="beta of FTRL, which limits the first steps of a row")
    l1: NotNegative = Field(default=0.0, description="L1 penalty of FTRL")
    l2: NotNegative = Field(default=0.0, description="L2 penalty of FTRL")
    weight_decay: NotNegative = Field(default=0.0, description="weight decay, added to the gradients of updated rows")
    dtype: Literal["float32", "float16", "int8"] = Field(
        default="float32", description="data type of stored rows; float64 with `train.precision: fp64`"
    )
    rows: PositiveInt | None = Field(
        default=None, description="number of rows of each table with `engine: torchrec`, to which ids are hashed"
    )
    init_scale: NotNegative = Field(
        default=0.01, description="initial values are drawn between -init_scale and init_scale"
    )
    memory_rows: PositiveInt | None = Field(
        default=None,
        description="number of rows of each width that a process keeps in memory; the others are in a file",
    )
    admission: AdmissionBlock | None = Field(default=None, description="admission of new ids to the tables")
    eviction: EvictionBlock | None = Field(default=None, description="eviction of rows from the tables")


class RankingBlock(Block):
    """``task: ranking``: a model that scores rows of a click log."""

    label: Text | list[Text] = Field(default="label", description="label column, or a list of them")
    positive: float | None = Field(default=None, description="smallest value of a positive label")
    model: Text = Field(
        default="dlrm", description=f"{', '.join(NAMES)}, or your own as package.module:name, called with the shape"
    )
    loss: Literal["cross-entropy", "in-batch-softmax"] = Field(
        default="cross-entropy",
        description="cross-entropy: of each row and label; in-batch-softmax: of the item of each positive row among "
        "all items of the step, for two-tower",
    )
    logq: LogQBlock = Field(default_factory=LogQBlock, description="logQ correction of `loss: in-batch-softmax`")
    engine: Literal["stoker", "torchrec"] = Field(
        default="stoker",
        description="embedding table engine: Stoker's growing tables, or TorchRec's of a fixed size with hashed ids",
    )
    width: PositiveInt = Field(default=16, description="embedding dimension")
    hidden: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        default=[128, 64], description="widths of a tower's hidden layers"
    )
    layers: PositiveInt = Field(default=3, description="number of cross layers of dcn")
    experts: PositiveInt = Field(
        default=4, description="number of experts of mmoe; for ple of each label, and of shared ones, at each level"
    )
    levels: PositiveInt = Field(default=2, description="number of levels of experts of ple; 1 is CGC")
    time: Text | None = Field(default=None, description="time column; by default found by its name")
    group: Text | None = Field(
        default=None,
        description="column that groups the rows of one ranking, such as the user; by default found by its name",
    )
    weight: Text | None = Field(
        default=None, description="column of the weights of the rows, in the loss and in metrics"
    )
    item: list[Text] = Field(
        default_factory=list,
        description="features of the item, its id first; for two-tower, whose retrieval ranks the values of the first",
    )
    features: list[FeatureBlock] = Field(
        default_factory=list, description="settings of features that differ from those found in the data"
    )
    ignore: list[str] = Field(default_factory=list, description="columns that are not features")
    crosses: list[list[Text]] = Field(default_factory=list, description="pairs of features to combine into one feature")
    slices: list[Text] = Field(default_factory=list, description="columns by whose values metrics are also reported")
    at: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        default=[10], description="sizes k of NDCG and recall"
    )
    progressive: bool = Field(
        default=False,
        description="read rows in time order, and evaluate each day but the first before training on it",
    )
    table: TableBlock = Field(default_factory=TableBlock, description="embedding tables and their optimizer")
    servers: ServersBlock | None = Field(
        default=None, description="parameter servers, which hold the rows on other hosts"
    )

    @property
    def gives_probabilities(self) -> bool:
        """Whether the sigmoid of a score is the probability of its label."""
        return self.loss == "cross-entropy"

    @property
    def nested(self) -> bool:
        """Whether the labels are a click and a conversion, which only follows a click."""
        return self.model == "esmm"

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    def stated(self, name: str) -> FeatureBlock:
        """Returns the settings of a feature, the defaults if it has none."""
        return next((feature for feature in self.features if feature.name == name), FeatureBlock(name=name))

    @property
    def named(self) -> list[tuple[str, str]]:
        """Pairs (key of the block, column) of every column that the job names."""
        found = [("label", name) for name in self.labels]
        found += [(key, name) for key in ("time", "group", "weight") if (name := getattr(self, key)) is not None]
        found += [("slices", name) for name in self.slices] + [("ignore", name) for name in self.ignore]
        found += [(f"features[{index}].name", feature.name) for index, feature in enumerate(self.features)]
        found += [(f"crosses[{index}]", name) for index, pair in enumerate(self.crosses) for name in pair]
        crosses = {" x ".join(pair) for pair in self.crosses}
        found += [("item", name) for name in self.item if name not in crosses]
        return found


REASONS = {
    "label": "the usual name",
    "positive": "labels are 0 and 1",
    "model": "the usual reference",
    "loss": "scores are probabilities",
    "logq.enabled": "without it frequent items are negatives too often",
    "logq.cells": "few collisions up to a hundred thousand items",
    "logq.rate": "a mean over about twenty batches with the item",
    "engine": "ids do not share rows, and no other package is needed",
    "width": "enough for most ids",
    "hidden": "small beside the tables",
    "layers": "as in the paper's experiments",
    "experts": "few labels share them",
    "levels": "as in the paper's experiments",
    "time": "found by its name, else the order of the rows",
    "group": "found by its name",
    "weight": "all rows have the same weight",
    "item": "only two-tower needs it",
    "features": "found from the first rows; `stoker data` shows them",
    "features.kind": "found from the first rows",
    "features.separator": "lists need none; found in texts where it is |",
    "features.buckets": "16, enough for a smooth curve",
    "features.boundaries": "quantiles of the training part",
    "features.longest": "50, as older ids carry little information",
    "features.table": "its own table; a sequence shares the table of its item if its name matches",
    "features.width": "all embeddings have the same dimension",
    "features.log": "where a few numbers are far larger than the others",
    "ignore": "every column is a feature",
    "crosses": "no pairs by default",
    "slices": "metrics over all rows",
    "at": "the usual size",
    "progressive": "rows are shuffled, and the latest are held out",
    "table.optimizer": "adapts the step to how often a row was seen, with one number per row",
    "table.lr": "the best of 0.01 to 0.2 on MovieLens-100K",
    "table.eps": "the usual choice",
    "table.initial": "a new row's first step uses the whole rate",
    "table.beta1": "the usual choice",
    "table.beta2": "the usual choice",
    "table.ftrl_beta": "the usual choice",
    "table.l1": "rows are not pulled towards zero",
    "table.l2": "rows are not pulled towards zero",
    "table.weight_decay": "rows are not pulled towards zero",
    "table.dtype": "exact",
    "table.rows": "100,000 with `engine: torchrec`",
    "table.init_scale": "near zero, so that a new id has little effect",
    "table.memory_rows": "all rows are in memory",
    "table.admission": "every id has a row from the start",
    "table.admission.count": "ids are admitted without waiting",
    "table.admission.probability": "every occurrence counts",
    "table.admission.cells": "few collisions up to a hundred thousand waiting ids",
    "table.eviction": "no row is deleted",
    "table.eviction.age": "rows are evicted by the size of the tables",
    "table.eviction.every": "a pass reads all rows",
    "table.eviction.frequency": "the frequency is not a condition",
    "table.eviction.norm": "the norm is not a condition",
    "table.eviction.max_rows": "rows are evicted by age",
    "table.eviction.score": "half of MovieLens-100K's rows cost 0.002 AUC, by frequency 0.016",
    "table.eviction.default_row": "the mean changes the AUC of MovieLens-100K by less than 0.0003",
    "servers": "the training processes hold the rows",
    "servers.staleness": "the same losses as without servers",
    "servers.patience": "a host may have to restart",
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
    "features.buckets": "16",
    "features.boundaries": "[18, 30, 50]",
    "features.longest": "50",
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
