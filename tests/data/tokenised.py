"""The training sequences of an encoded batch, one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.data.files.row_batch import EncodedBatch


@dataclass(frozen=True)
class Tokenised:
    """One training sequence; the names are those of `stoker.data.files.row_batch.INDEX`."""

    ids: np.ndarray
    trained: np.ndarray
    source: str
    row: int
    lost: int
    stops: bool
    continues: bool
    exact: bool
    digest: int


def sequences_of(batch: EncodedBatch) -> list[Tokenised]:
    """Every sequence of a batch."""
    found = []
    for entry in batch.index:
        tokens = slice(entry["start"], entry["start"] + entry["length"])
        flags = {name: entry[name].item() for name in ("row", "lost", "stops", "continues", "exact", "digest")}
        found.append(Tokenised(batch.ids[tokens], batch.trained[tokens], batch.files[entry["file"]], **flags))
    return found
