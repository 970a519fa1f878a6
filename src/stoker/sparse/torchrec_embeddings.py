"""The same module on TorchRec's tables, whose kernels also run on GPUs: a fixed number of rows for any ids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.errors import CannotRun, Problem, UserError, reason_of
from stoker.sparse.embeddings import Admissions, Embeddings
from stoker.sparse.fused_tables import Feature, FeatureBags
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.shard_memory import state_bytes
from stoker.sparse.shard_state import no_rows
from stoker.sparse.sparse_state import LazyColumn, LazyPart, SparseState
from stoker.sparse.table_settings import TableSettings

if TYPE_CHECKING:
    from stoker.sparse.torchrec_tables import LocalTable

OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd")
MATCHED = {"2.13": ("1.8.0", "1.8.0"), "2.12": ("1.7.0", "1.7.0"), "2.11": ("1.6.1", "1.6.0")}  # TorchRec, FBGEMM
Bag = tuple[Tensor, Tensor, Tensor]  # numbers of rows [n], rows of each sample [batch], factors [n]


@dataclass(frozen=True)
class _Pass:
    """A forward pass that needs gradients.

    Attributes:
        bags: by feature.
        pooled: outputs of the tables, by feature.
        leaves: the same for the model, which accumulate their gradients.
    """

    bags: Mapping[str, Bag]
    pooled: Mapping[str, Tensor]
    leaves: Mapping[str, Tensor]


class TorchRecEmbeddings(Embeddings):
    """`SparseEmbeddings` on TorchRec's tables.

    An id's row is its hash modulo the rows of its table: ids may collide, and every id has a row. A state's ids are
    the numbers of rows.

    TorchRec updates rows within the backward pass of a lookup. The model therefore gets leaves, and `apply_gradients`
    propagates their gradients, once a step, so that steps can be discarded and scaled, and several passes make one
    step.

    Args:
        rows: of each table.
        group: processes over which tables are placed, all of the default group; None for one process.

    Raises:
        CannotRun: TorchRec is not installed, or does not fit torch.
        UserError: a setting that TorchRec has no counterpart for.
    """

    def __init__(
        self,
        tables: Sequence[TableSettings],
        features: Mapping[str, Feature],
        *,
        rows: Mapping[str, int],
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        _refuse(tables, features, rows)
        self._group = None if group is None or dist.get_world_size(group) == 1 else group
        self._device, self._settings = torch.device(device), list(tables)
        self._sizes = np.array([rows[table.name] for table in tables], dtype=np.uint64)
        self._names = list(features)
        ordered = {n: feature for table in tables for n, feature in features.items() if feature.table == table.name}
        self._bags = FeatureBags(tables, ordered, device=torch.device("cpu"), dtype=torch.float32)
        try:
            from stoker.sparse.torchrec_tables import TorchRecTables
        except (ImportError, OSError, AttributeError) as error:  # a pair that does not match fails in its libraries
            raise CannotRun(Problem(f"TorchRec cannot be loaded: {reason_of(error)}", _what_to_install())) from error
        self._inner = TorchRecTables(tables, ordered, rows=rows, seed=seed, device=self._device, group=self._group)
        self._repeats = {name: self._inner.repeats[feature.table] for name, feature in features.items()}
        self._passes: list[_Pass] = []
        self._step, self._rate = 0, 1.0

    @property
    def tables(self) -> list[TableSettings]:
        return list(self._settings)

    @property
    def version(self) -> int:
        return self._step

    @property
    def rows(self) -> dict[str, int]:
        here = {local.name: len(local) for local in self._inner.local()}
        return {table.name: here.get(table.name, 0) for table in self._settings}

    def forward(self, ids: Mapping[str, JaggedIds]) -> dict[str, Tensor]:
        """Returns the pooled rows of each feature's ids, [batch, width]. A collective."""
        bags = self._bags_of(ids)
        if not (self.training and torch.is_grad_enabled()):
            with torch.no_grad():
                pooled = self._look_up(bags)
            return {name: self._once(name, pooled[name]) for name in self._names}
        pooled = self._look_up(bags)
        leaves = {name: self._once(name, pooled[name]).detach().requires_grad_() for name in self._names}
        self._passes.append(_Pass(bags, pooled, leaves))
        return leaves

    def found(self, ids: Mapping[str, JaggedIds]) -> dict[str, np.ndarray]:
        """Returns all true: every id has a row, which it may share."""
        return {name: np.ones(len(some.ids), dtype=bool) for name, some in ids.items()}

    def default_rows(self) -> dict[str, np.ndarray]:
        """Returns zeros: every id has a row, so no id gets the default row."""
        return {table.name: np.zeros(table.width) for table in self._settings}

    def admissions(self) -> Admissions:
        """Returns all rows as admitted, since they exist from the start."""
        rows = int(self._sizes.sum())
        return Admissions(rows, rows, 0)

    def prefetch(self, *batches: Mapping[str, JaggedIds]) -> None:
        """Does nothing: all rows are in the device's memory."""

    def gradients_are_finite(self) -> bool:
        """Returns whether the pooled rows' gradients are finite in all passes of this process."""
        leaves = [leaf for one in self._passes for leaf in one.leaves.values()]
        return all(bool(leaf.grad.isfinite().all()) for leaf in leaves if leaf.grad is not None)

    def apply_gradients(self, *, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Updates the rows that were looked up, each once, and ends the step.

        FBGEMM takes the learning rate at the lookup: where it is another one then, or there were several passes, the
        rows are looked up once more, all samples together.
        """
        passes, self._passes = self._passes, []
        again, self._rate = len(passes) > 1 or lr_factor != self._rate, lr_factor
        self._inner.set_rate(lr_factor)
        if passes:
            grads = {name: torch.cat([_gradient(one.leaves[name]) for one in passes]) * scale for name in self._names}
            pooled = self._look_up(_joined([one.bags for one in passes])) if again else passes[0].pooled
            every = [grad.repeat(1, self._repeats[name]) for name, grad in grads.items()]
            torch.autograd.backward([pooled[name] for name in grads], every)
        self._step += 1

    def discard(self) -> None:
        self._passes.clear()

    def end_empty_steps(self, until: int) -> None:
        self._step = max(self._step, until)

    def state(self, since: int | None = None, *, is_base: bool = True) -> SparseState:
        """Returns the rows of this process' tables.

        Raises:
            ValueError: for an incremental state.
        """
        parts = self.lazy_parts(since, part_bytes=2**62)
        return SparseState(self._step, since, {part.table: part.state() for part in parts})

    def parts(self, since: int | None = None, *, rows: int = 2**20, is_base: bool = True) -> Iterator[SparseState]:
        for local in self._inner.local():
            for part in self._parts_of(local, since, rows):
                yield SparseState(self._step, since, {part.table: part.state()})

    def lazy_parts(self, since: int | None = None, *, part_bytes: int, is_base: bool = True) -> Iterator[LazyPart]:
        settings = {table.name: table for table in self._settings}
        for local in self._inner.local():
            yield from self._parts_of(local, since, max(1, part_bytes // state_bytes([settings[local.name]], 1)))

    def rebase(self, version: int | None, *, by: str = "") -> None:
        """Does nothing: TorchRec does not record which rows have changed."""

    def put(self, part: SparseState) -> None:
        """Takes over rows of the tables that this process has.

        Raises:
            ValueError: a table has fewer rows.
        """
        self._step = part.step
        here = {local.name: local for local in self._inner.local()}
        for name, table in part.tables.items():
            local = here.get(name)
            if local is None or not len(table.ids):
                continue
            if not 0 <= int(table.ids.min()) <= int(table.ids.max()) < len(local):
                found = f"row {int(table.ids.max())}, and this job's have {len(local)}"
                raise ValueError(f"the rows of table {name!r} are others: there is {found}")
            local.write(table.ids, table.values, table.optimizer)

    def end_load(self) -> None:
        """Does nothing: each process has read its own rows."""

    def _parts_of(self, local: LocalTable, since: int | None, rows: int) -> Iterator[LazyPart]:
        if since is not None:
            raise ValueError("TorchRec does not know which rows have changed")
        nothing = no_rows(next(table for table in self._settings if table.name == local.name))
        values, moment = local.values, local.moment
        for start in range(0, len(local), rows):
            stop = min(start + rows, len(local))
            count = stop - start
            zeros = torch.zeros(count, dtype=torch.int32)
            columns = {
                "ids": LazyColumn.of(torch.arange(start, stop)),
                "values": LazyColumn((count, values.shape[1]), torch.float32, partial(_copy, values, start, stop)),
                "optimizer": LazyColumn((count, moment.shape[1]), torch.float32, partial(_copy, moment, start, stop)),
                "seen": LazyColumn.of(zeros),
                "last": LazyColumn.of(zeros),
            }
            others = {each.name: LazyColumn.of(getattr(nothing, each.name)) for each in fields(nothing)}
            yield LazyPart(local.name, others | columns)

    def _bags_of(self, ids: Mapping[str, JaggedIds]) -> dict[str, Bag]:
        """Returns the bags of each feature, in the order of their tables."""
        bags = self._bags.bags(ids)
        rows = torch.from_numpy((bags.keys.hashes % self._sizes[bags.keys.tables]).view(np.int64))
        factors = torch.ones(len(rows)) if bags.weights is None else bags.weights.float()
        lengths = torch.from_numpy(bags.lengths).split([math.prod(shape) for shape in bags.shapes.values()])
        sizes = [int(some.sum()) for some in lengths]
        found = zip(rows.split(sizes), lengths, factors.split(sizes), strict=True)
        return dict(zip(bags.shapes, found, strict=True))

    def _once(self, name: str, pooled: Tensor) -> Tensor:
        """Returns the numbers of a feature, each once. [batch, width]."""
        return pooled[:, : pooled.shape[1] // self._repeats[name]]

    def _look_up(self, bags: Mapping[str, Bag]) -> dict[str, Tensor]:
        rows, lengths, weights = zip(*bags.values(), strict=True)
        return self._inner.look_up(rows, lengths, weights)


def _joined(passes: Sequence[Mapping[str, Bag]]) -> dict[str, Bag]:
    """Concatenates the samples of several passes as those of one."""
    found: dict[str, Bag] = {}
    for name in passes[0]:
        rows, lengths, weights = (torch.cat(some) for some in zip(*(one[name] for one in passes), strict=True))
        found[name] = rows, lengths, weights
    return found


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _copy(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop].cpu().clone()


def _refuse(tables: Sequence[TableSettings], features: Mapping[str, Feature], rows: Mapping[str, int]) -> None:
    """Raises with every setting that TorchRec does not support."""
    problems = []
    for table in tables:
        used = {feature.pooling for feature in features.values() if feature.table == table.name}
        if not used or "none" in used:
            found = "a feature that is not pooled" if used else "no features"
            problems.append(Problem(f"table {table.name!r} has {found}: TorchRec pools the rows of every feature"))
        for name in ("admission", "eviction", "disk"):
            if getattr(table, name) is not None:
                problems.append(Problem(f"table {table.name!r} has {name}, which TorchRec's tables have not"))
        if table.optimizer not in OPTIMIZERS or table.initial:
            named = table.optimizer if table.optimizer not in OPTIMIZERS else "an initial accumulator"
            problems.append(Problem(f"table {table.name!r} has {named}", f"take one of {', '.join(OPTIMIZERS)}"))
        if table.dtype != "float32":
            problems.append(Problem(f"table {table.name!r} has {table.dtype} rows", "take float32"))
        if rows.get(table.name, 0) < 1:
            problems.append(Problem(f"table {table.name!r} has no number of rows", "state how many it has"))
    if not problems and len({(table.optimizer, table.lr, table.eps, table.weight_decay) for table in tables}) > 1:
        problems.append(Problem("the tables have several optimizers", "give all of them one"))
    if problems:
        raise UserError(*problems)


def _what_to_install() -> str:
    """Returns the set of packages that fits this torch."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    if (matched := MATCHED.get(torch_version)) is None:
        return (
            f"it is released for one torch at a time: install torch {' or '.join(MATCHED)}, or write `engine: stoker`"
        )
    wheel = "fbgemm-gpu" if torch.version.cuda else "fbgemm-gpu-cpu"
    return (
        f"install the set that fits torch {torch_version}: `pip install {wheel}=={matched[1]} tensordict "
        f"torchmetrics==1.0.3 tqdm pyre-extensions iopath`, then `pip install --no-deps torchrec=={matched[0]}`; "
        "or write `engine: stoker`"
    )
