"""The size of a shard of tables, in memory and on disk, measured or predicted from its number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.sparse.id_index import FULL
from stoker.sparse.row_optimizers import OPTIMIZERS
from stoker.sparse.sketch import CountMinSketch
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.value_format import RowFormat

FIRST_ROWS, FIRST_ENTRIES = 1024, 4096  # capacity of an empty shard
GROWTH = 3 / 2  # growth of the arrays with an element per row, when they are full; the index doubles
ENTRY, COUNTERS, PLACE = 16, 12, 10  # bytes: of the index; of a row's ages and counts; of its id and table
SAVED = 8 + 4 + 4  # bytes of a row's id, age and count in a checkpoint
TIER_ROW, TIER_SLOT = 4 + 8, 8 + 4  # bytes that a disk tier adds for each row and for each row in memory


@dataclass(frozen=True)
class ShardMemory:
    """Size of a shard, in bytes.

    Attributes:
        rows: values and optimizer state in memory.
        index: ids, tables and the hash table.
        counters: when and how often each row was seen.
        sketches: of ids that wait for a row.
        file: values and state on the disk.
    """

    rows: int
    index: int
    counters: int
    sketches: int = 0
    file: int = 0

    @property
    def total(self) -> int:
        """Bytes in memory."""
        return self.rows + self.index + self.counters + self.sketches


def row_bytes(table: TableSettings) -> int:
    """Returns the bytes of the values and the optimizer state of a row."""
    form = RowFormat(table.dtype, table.width)
    state = OPTIMIZERS[table.optimizer].columns(table.width)
    return form.columns * form.stored.itemsize + state * form.compute.itemsize


def predict_memory(tables: Sequence[TableSettings], rows: int, *, first: int = 1, world: int = 1) -> ShardMemory:
    """Predicts the memory of a process' part of tables with one layout.

    Args:
        rows: of the process, of all tables together.
        first: of them, those that the first step makes: capacity grows by half from there.
        world: processes that share the tables.
    """
    room = room_for(rows + 1, first)
    entries = FIRST_ENTRIES
    while FULL * entries < rows:
        entries *= 2
    size = row_bytes(tables[0])
    admissions = [table.admission for table in tables if table.admission is not None and table.admission.count > 1]
    sketches = sum(CountMinSketch.bytes_of(admission.cells, world) for admission in admissions)
    index, counters = ENTRY * entries + PLACE * room, COUNTERS * room
    disk = tables[0].disk
    if disk is None:
        return ShardMemory(size * room, index, counters, sketches)
    held = size * (disk.rows + 1) + TIER_SLOT * (disk.rows + 1) + TIER_ROW * room
    return ShardMemory(held, index, counters, sketches, size * max(0, rows - disk.rows))


def room_for(rows: int, first: int = 1) -> int:
    """Returns the capacity in rows once there are ``rows``, of which each step has made ``first`` at most."""
    room = FIRST_ROWS
    while room < rows:
        room = max(min(rows, (room // first + 1) * first + 1), int(room * GROWTH))
    return room


def state_bytes(tables: Sequence[TableSettings], rows: int) -> int:
    """Returns the size in bytes of a copy of rows in the format of checkpoints."""
    return rows * (SAVED + row_bytes(tables[0]))
