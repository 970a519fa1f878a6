"""Rows in two tiers: the most recently written are in memory, the others in a file."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.id_index import lengthened_copy
from stoker.sparse.memory_rows import MemoryRows
from stoker.sparse.row_log import RowLog
from stoker.sparse.table_settings import DiskTier

_BATCH = 16  # rows leave memory together, this fraction (1 / 16) of its limit at a time
_THREADS = 4  # threads that read the file, as a disk serves several requests at once
_WAITING = 4 * _THREADS  # maximum of pending parts of requests; the oldest belong to the current batch


class TieredRows:
    """`MemoryRows` with a limit on the rows in memory.

    Reading a row does not move it. Writing a row puts it in memory, and evicts the least recently written rows to the
    file. As every step writes the rows that it has read, the order is LRU.

    Args:
        tier: limit on the rows in memory, and the folder of the file.
    """

    def __init__(
        self, columns: int, dtype: torch.dtype, state_columns: int, state_dtype: torch.dtype, tier: DiskTier
    ) -> None:
        self._most = tier.rows
        self._hot = MemoryRows(columns, dtype, state_columns, state_dtype)
        self._hot.reserve(tier.rows + 1)  # slot 0 belongs to row 0
        widths = [torch.empty(columns, dtype=dtype).nbytes, torch.empty(state_columns, dtype=state_dtype).nbytes]
        self._value_bytes, self._dtypes = widths[0], (dtype, state_dtype)
        self._log = RowLog(tier.folder, sum(widths))
        self._slots = np.full(1024, -1, np.int32)  # slot of each row
        self._slots[0] = 0
        self._rows = np.full(tier.rows + 1, -1, np.int64)  # row of each slot
        self._written = np.zeros(tier.rows + 1, np.int32)
        self._free = np.arange(tier.rows, 0, -1)
        self._clock = 0
        self._threads: ThreadPoolExecutor | None = None
        self._coming: deque[np.ndarray] = deque(maxlen=_WAITING)

    @property
    def bytes(self) -> int:
        """Memory in bytes, without the page cache."""
        return sum(x.nbytes for x in (self._slots, self._rows, self._written)) + self._hot.bytes + self._log.bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._log.file_bytes

    def reserve(self, top: int) -> None:
        """Reserves memory for rows below ``top``."""
        if top > len(self._slots):
            self._slots = lengthened_copy(self._slots, max(top, len(self._slots) * 3 // 2), -1)

    def values(self, rows: np.ndarray) -> Tensor:
        """Returns a copy of stored values [n, columns]; rows may repeat."""
        slots = self._slots[rows]
        found = self._hot.values(np.maximum(slots, 0))
        if len(cold := np.flatnonzero(slots < 0)):
            records = self._log.read(rows[cold])[:, : self._value_bytes]
            found[torch.from_numpy(cold)] = _tensor(records, self._dtypes[0])
        return found

    def state(self, rows: np.ndarray) -> Tensor:
        """Returns a copy of the optimizer's state [n, state_columns]."""
        slots = self._slots[rows]
        found = self._hot.state(np.maximum(slots, 0))
        if found.shape[1] and len(cold := np.flatnonzero(slots < 0)):
            records = self._log.read(rows[cold])[:, self._value_bytes :]
            found[torch.from_numpy(cold)] = _tensor(records, self._dtypes[1])
        return found

    def write(self, rows: np.ndarray, values: Tensor, state: Tensor) -> None:
        """Stores values and state of unique rows."""
        for at in range(0, len(rows), self._most):  # in chunks that fit in memory
            part = slice(at, at + self._most)
            self._write(rows[part], values[part], state[part])

    def _write(self, rows: np.ndarray, values: Tensor, state: Tensor) -> None:
        self._clock += 1
        slots = self._slots[rows]
        self._written[slots[slots >= 0]] = self._clock
        cold = rows[slots < 0]
        if len(cold) > len(self._free):
            self._push_out(len(cold) - len(self._free))
        given = self._free[len(self._free) - len(cold) :]
        self._free = self._free[: len(self._free) - len(cold)]
        self._log.drop(cold)
        self._slots[cold], self._rows[given], self._written[given] = given, cold, self._clock
        self._hot.write(self._slots[rows].astype(np.int64), values, state)

    def free(self, rows: np.ndarray) -> None:
        """Frees rows; they are not read again before they are written."""
        slots = self._slots[rows]
        slots = slots[slots > 0]
        self._rows[slots], self._slots[rows] = -1, -1
        self._free = np.concatenate([self._free, slots])
        self._log.drop(rows)

    @property
    def waits(self) -> bool:
        """Whether reads of the file wait for the disk often enough for `prefetch` to pay; False if it is cached."""
        return self._log.waits.often

    def prefetch(self, rows: np.ndarray) -> None:
        """Loads records of rows from the file into the page cache, in threads, after those of earlier calls."""
        cold = rows[self._slots[rows] < 0]
        if len(cold):
            self._threads = self._threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="rows")
            for part in np.array_split(cold, _THREADS):
                self._coming.append(part)
                self._threads.submit(self._touch)

    def _touch(self) -> None:
        """Loads the oldest pending request, in a thread; does nothing if it was dropped."""
        try:
            rows = self._coming.popleft()
        except IndexError:
            return
        self._log.touch(rows)

    def _push_out(self, least: int) -> None:
        """Moves the least recently written rows to the file."""
        taken = np.flatnonzero((self._rows > 0) & (self._written < self._clock))
        count = min(max(least, self._most // _BATCH), len(taken))
        slots = taken[np.argpartition(self._written[taken], count - 1)[:count]]
        rows = self._rows[slots]
        parts = [self._hot.values(slots), self._hot.state(slots)]
        self._log.append(rows, np.concatenate([_bytes(part) for part in parts], axis=1))
        self._slots[rows], self._rows[slots] = -1, -1
        self._free = np.concatenate([self._free, slots])


def _bytes(rows: Tensor) -> np.ndarray:
    return rows.numpy().view(np.uint8).reshape(len(rows), -1)


def _tensor(records: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(records.copy()).view(dtype)  # a single row counts as contiguous, whatever its stride
