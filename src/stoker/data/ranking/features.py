"""The features of a click log, its labels and its time column, and how each feature is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from pydantic import TypeAdapter

Kind = Literal["dense", "buckets", "id", "ids", "sequence", "cross"]
"""The kind of a feature: a number, a quantile-bucketed number, one id, a bag of ids, a sequence of ids, a cross."""

NUMBERS = ("dense", "buckets")
STATED = "stated"  # `Column.why` of a kind that the job states
_FLAGS = ("nested", "time_in_digits")


@dataclass(frozen=True)
class Column:
    """A feature.

    Attributes:
        name: the feature's name, which is its column's unless it is a cross.
        why: how its kind was detected, as text for people.
        separator: between the values of a cell; empty if a cell is one value, or a list.
        weighted: whether each id comes with a weight, as ``{"id": 0.5}``, ``[["id", 0.5]]`` or ``id:0.5``.
        table: name of its embedding table; features with one table share rows.
        longest: maximum length of a sequence; the newest ids are kept.
        buckets: number of buckets of a quantile-bucketed number.
        crossed: the two features of a cross.
        log: whether a number x is first transformed to sign(x) log(1 + |x|).
        mean, scale: of the training rows: a number enters the model as (x - mean) / scale.
        boundaries: between buckets, quantiles of the training rows.
    """

    name: str
    kind: Kind
    why: str = ""
    separator: str = ""
    weighted: bool = False
    table: str = ""
    longest: int = 0
    buckets: int = 0
    crossed: tuple[str, ...] = ()
    log: bool = False
    mean: float = 0.0
    scale: float = 1.0
    boundaries: tuple[float, ...] = ()

    @property
    def has_ids(self) -> bool:
        """Returns whether the feature is looked up in an embedding table."""
        return self.kind != "dense"

    @property
    def stored(self) -> bool:
        """Returns whether the feature is read from the rows, rather than computed from other features."""
        return self.kind != "cross"


@dataclass(frozen=True)
class Features:
    """The inputs that a model gets from each row.

    Attributes:
        labels: columns of labels.
        positive: the lowest value of a positive label; None if labels are 0 and 1.
        time: column of the time; None if the rows are already ordered by it.
        time_unit: of times since 1970, in seconds; None if the times are others.
        time_in_digits: whether numbers of the time column are dates in digits, such as 20240131.
        group: column by which the grouped AUC and rankings are computed, such as the user.
        weight: column of the rows' weights in the loss.
        slices: columns by whose values the metrics are reported too.
        columns: the features, in the order of the data.
        nested: whether the second label can be positive only where the first is, as a conversion follows a click.
    """

    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    positive: float | None = None
    time: str | None = None
    time_unit: float | None = None
    group: str | None = None
    weight: str | None = None
    slices: tuple[str, ...] = field(default=())
    nested: bool = False
    time_in_digits: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of a row's scores: the labels and, if they are nested, the second one given the first."""
        return (*self.labels, f"{self.labels[1]} given {self.labels[0]}") if self.nested else self.labels

    @property
    def dense(self) -> tuple[Column, ...]:
        """The numeric features that enter the model directly."""
        return tuple(column for column in self.columns if column.kind == "dense")

    @property
    def ids(self) -> tuple[Column, ...]:
        """Features that are looked up in tables."""
        return tuple(column for column in self.columns if column.has_ids)

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    @property
    def read(self) -> frozenset[str]:
        """The columns that rows are expected to have: labels, group and features."""
        stored = (column.name for column in self.columns if column.stored)
        return frozenset((*self.labels, *stored, *([] if self.group is None else [self.group])))

    def with_columns(self, columns: dict[str, Column]) -> Features:
        """Returns a copy with some of the features replaced."""
        return replace(self, columns=tuple(columns.get(column.name, column) for column in self.columns))

    @property
    def unfitted(self) -> Features:
        """Returns the features without fitted values and reasons."""
        plain = {c.name: replace(c, mean=0.0, scale=1.0, boundaries=(), why="", table="") for c in self.columns}
        return self.with_columns(plain)

    def as_json(self) -> dict[str, Any]:
        """Returns the values for a file of JSON; without flags that are not set, as records of earlier versions lack
        them.
        """
        return {name: value for name, value in asdict(self).items() if name not in _FLAGS or value}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Restores the features from the output of `as_json`.

        Raises:
            ValueError: they have another form.
        """
        return TypeAdapter(cls).validate_python(values)
