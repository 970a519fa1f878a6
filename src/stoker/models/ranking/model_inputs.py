"""The shape of a ranking model, and its inputs.

Shapes: B rows, F vectors of features, D their width, L ids of a sequence, N numbers, T labels (tasks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, cat

FIRST_ORDER = " (first order)"  # behind the name of a feature: its table of single weights


@dataclass(frozen=True)
class RankingShape:
    """The dimensions that a model is built with.

    Attributes:
        features: features with one vector per row, [B, D], in order.
        sequences: features with one vector per id, [B, L, D], by the feature whose table they share.
        numbers: dense inputs.
        width: of a vector, unless ``widths`` overrides it.
        labels: outputs.
        item: of the features, those of the item (for two-tower); the others are the user's.
        hidden: widths of the hidden layers of a tower.
        experts: of a mixture; for PLE of each label, and as many shared ones.
        layers: crosses of DCN.
        levels: of experts in PLE.
        widths: of the vectors of features and sequences that have another width.
    """

    features: tuple[str, ...]
    sequences: Mapping[str, str] = field(default_factory=dict)
    numbers: int = 0
    width: int = 16
    labels: int = 1
    item: tuple[str, ...] = ()
    hidden: tuple[int, ...] = (128, 64)
    experts: int = 4
    layers: int = 3
    levels: int = 2
    widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """Width of all vectors and numbers side by side."""
        return sum(map(self.width_of, self.features)) + self.numbers

    def width_of(self, name: str) -> int:
        """Width of a vector of a feature or sequence."""
        return self.widths.get(name, self.width)


@dataclass(frozen=True)
class RankingInputs:
    """A batch.

    Attributes:
        vectors: by feature [B, D]; by sequence [B, L, D], zeros behind the last id; by feature and `FIRST_ORDER`
            [B, 1] where the model has single weights. D is `RankingShape.width_of` the feature or sequence.
        lengths: ids of each row by sequence, int64 [B].
        dense: [B, N].
    """

    vectors: Mapping[str, Tensor]
    lengths: Mapping[str, Tensor]
    dense: Tensor


def side_by_side(inputs: RankingInputs, shape: RankingShape) -> Tensor:
    """Concatenates all vectors and the numbers of each row, [B, F x D + N]."""
    return cat([*(inputs.vectors[name] for name in shape.features), inputs.dense], dim=1)
