"""Settings and rows of tables in the messages between trainers and servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from stoker.sparse.servers.server_connection import Message
from stoker.sparse.sparse_state import TableState
from stoker.sparse.table_settings import Admission, DiskTier, Eviction, TableSettings


def dict_of(table: TableSettings) -> Message:
    """Converts a table's settings to JSON types."""
    return json.loads(json.dumps(asdict(table), default=str))


def settings_of(table: Message) -> TableSettings:
    """Restores settings from the output of `dict_of`."""
    parts: dict[str, Any] = {"admission": Admission, "eviction": Eviction, "disk": DiskTier}
    made = {name: kind(**table[name]) for name, kind in parts.items() if table[name]}
    return TableSettings(**{**table, "betas": tuple(table["betas"]), **made})


def arrays_of(rows: TableState) -> list[np.ndarray]:
    """Returns the tensors of a table's rows as arrays, in the order of the fields."""
    return [tensor.numpy() for tensor in vars(rows).values()]


def rows_of(arrays: Sequence[np.ndarray]) -> TableState:
    """Restores a table's rows from the output of `arrays_of`."""
    return TableState(*(torch.from_numpy(np.array(array)) for array in arrays))
