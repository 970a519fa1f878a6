"""The job's settings for a click log's columns; everything else is detected from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.data.ranking.features import Kind

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


@dataclass(frozen=True)
class StatedFeature:
    """A feature that the job describes; None and empty values are found. Attributes as in `Column`."""

    name: str
    kind: Kind | None = None
    separator: str = ""
    buckets: int = 0
    boundaries: tuple[float, ...] = ()
    longest: int = 0
    table: str = ""
    log: bool | None = None


@dataclass(frozen=True)
class LogSettings:
    """The columns of a job of task ranking; see `stoker.data.ranking.features.Features`.

    Attributes:
        ignore: columns that are not features.
        crosses: pairs of features whose combination is a feature.
        longest: maximum length of a sequence in ids, unless a feature sets its own.
    """

    labels: tuple[str, ...] = ("label",)
    positive: float | None = None
    time: str | None = None
    group: str | None = None
    weight: str | None = None
    slices: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    crosses: tuple[tuple[str, ...], ...] = ()
    features: tuple[StatedFeature, ...] = ()
    longest: int = 50

    def stated(self, name: str) -> StatedFeature:
        """Returns the job's settings of a feature, empty if it has none."""
        return next((feature for feature in self.features if feature.name == name), StatedFeature(name))

    @property
    def named(self) -> Sequence[tuple[str, str]]:
        """(key of the block, column) of every column that the job names."""
        found = [("label", name) for name in self.labels]
        found += [(key, name) for key in ("time", "group", "weight") if (name := getattr(self, key)) is not None]
        found += [("slices", name) for name in self.slices] + [("ignore", name) for name in self.ignore]
        found += [(f"features[{index}].name", feature.name) for index, feature in enumerate(self.features)]
        return found
