"""The settings of a table: its width, its optimizer, and the admission and eviction of its ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
Dtype = Literal["float64", "float32", "float16", "int8"]
Score = Literal["norm-frequency", "frequency", "norm", "recency"]
DefaultRow = Literal["zeros", "mean"]


@dataclass(frozen=True)
class Admission:
    """The admission of new ids: those that satisfy both conditions get a row, at the end of a step.

    Until then they have the default row, which is not trained; see `Eviction`.

    Attributes:
        count: occurrences before an id is admitted, estimated by a count-min sketch, which never underestimates.
        probability: that one occurrence admits the id; drawn from (seed, table, id, step).
        cells: counters of the sketch for each of its four hash functions.
    """

    count: int = 1
    probability: float = 1.0
    cells: int = 2**18

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 < self.probability <= 1 or self.cells < 1:
            raise ValueError(f"count and cells are at least 1, probability in (0, 1]: {self}")


@dataclass(frozen=True)
class Eviction:
    """The eviction of rows: those that satisfy every stated condition are deleted.

    Attributes:
        age: steps since the id was last seen.
        every: steps between two passes over the rows.
        frequency: only ids that were seen fewer times since their row was made.
        norm: only rows whose Euclidean norm is below it.
        max_rows: only the excess over this number of rows, of all tables with this rule together, lowest scores first;
            None for no limit.
        score: by which rows are ranked: the norm times the number of occurrences, occurrences (LFU), the norm, or the
            step in which the id was last seen (LRU).
        default_row: the row of ids without one. ``mean``: the mean of the evicted rows, each weighted by its number
            of occurrences; each pass halves the weight of those before it.
    """

    age: int = 1
    every: int = 1000
    frequency: int | None = None
    norm: float | None = None
    max_rows: int | None = None
    score: Score = "norm-frequency"
    default_row: DefaultRow = "zeros"

    def __post_init__(self) -> None:
        if self.age < 1 or self.every < 1:
            raise ValueError(f"age and every are at least one step: {self}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"at least one row is kept: {self}")


@dataclass(frozen=True)
class DiskTier:
    """Storage of rows beyond a limit in a file.

    Attributes:
        folder: the file's folder; it is a working file, which no checkpoint refers to.
        rows: rows of a process that are in memory, over all tables that share these settings.
    """

    folder: Path
    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"at least one row is in memory: {self}")


@dataclass(frozen=True)
class TableSettings:
    """A table.

    Attributes:
        name: unique; first values depend on it.
        width: numbers a row.
        optimizer: applied to rows that were looked up since the last step, once, with the sum of their gradients.
        lr: learning rate.
        eps: added to the denominator of Adagrad and Adam.
        initial: first value of Adagrad's accumulators, and of FTRL's, which needs more than 0 where beta is 0.
        betas: of Adam.
        ftrl_beta, l1, l2: of FTRL (McMahan et al., 2013).
        weight_decay: L2 penalty, added to the gradient of rows that are updated.
        dtype: of the stored values. Arithmetic is float64 for float64, else float32. float16 and int8 (with a scale
            for each row) are rounded stochastically, by draws from (seed, table, id, step).
        init_scale: first values are uniform in [-init_scale, init_scale), a function of (seed, table, id).
        disk: None if all rows are in memory.
    """

    name: str
    width: int
    optimizer: Optimizer = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    initial: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    ftrl_beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0
    dtype: Dtype = "float32"
    init_scale: float = 0.01
    admission: Admission | None = None
    eviction: Eviction | None = None
    disk: DiskTier | None = None

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"the width of table {self.name!r} is {self.width}")
        if self.lr < 0 or self.eps < 0 or self.init_scale < 0:
            raise ValueError(f"lr, eps and init_scale of table {self.name!r} are not negative")
        if self.optimizer == "ftrl" and not (self.lr and (self.ftrl_beta or self.initial or self.l2)):
            raise ValueError(f"ftrl of table {self.name!r} needs lr and one of ftrl_beta, initial and l2 above 0")

    @property
    def layout(self) -> tuple[object, ...]:
        """The settings that tables share if their rows are stored and updated together."""
        optimizer = (self.optimizer, self.lr, self.eps, self.initial, self.betas, self.ftrl_beta, self.l1, self.l2)
        return (self.width, self.dtype, *optimizer, self.weight_decay, self.disk)


def by_layout(tables: Iterable[TableSettings]) -> list[list[TableSettings]]:
    """Groups tables with the same `TableSettings.layout`, in the order of each group's first table."""
    groups: dict[tuple[object, ...], list[TableSettings]] = {}
    for table in tables:
        groups.setdefault(table.layout, []).append(table)
    return list(groups.values())
