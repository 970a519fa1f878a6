"""The rows of one layout on one server, and the trainers' steps on them."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.errors import Problem, RunFailed, UserError, typed_reason
from stoker.sparse.eviction_pass import Candidates, EvictionPlan
from stoker.sparse.servers.step_log import StepLog
from stoker.sparse.sparse_state import SparseState, TableState
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.table_shard import TableShard


@dataclass(frozen=True)
class Push:
    """A trainer's gradients for a step.

    Attributes:
        keys: each once.
        counts: int64 [n], occurrences.
        grads: [n, width], sums over occurrences.
    """

    keys: Keys
    counts: np.ndarray
    grads: Tensor


@dataclass(frozen=True)
class Commit:
    """The outcome of a step: an update, nothing where ``scale`` is None, or an eviction pass.

    Attributes:
        plan: from the first trainer, for an eviction pass.
    """

    scale: float | None
    lr_factor: float
    plan: EvictionPlan | None = None


@dataclass
class _Step:
    pushes: dict[int, Push] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)


class ServedShard:
    """A `TableShard` whose steps are made by several trainers, and logged before they count.

    A step is made once every trainer has pushed its gradients and committed it. Lookups change nothing, so that
    trainers can repeat everything that a killed server had not logged.

    Args:
        folder: of the log and its snapshots, which are restored.
        number, servers: this server's index, and the number of servers.
        trainers: number of training processes.
        snapshot_every: steps.

    Attributes:
        step: steps that the trainers have decided on, made or skipped. The rows count only those that were made.
    """

    def __init__(
        self,
        tables: Sequence[TableSettings],
        folder: Path,
        *,
        seed: int,
        number: int,
        servers: int,
        trainers: int,
        snapshot_every: int,
    ) -> None:
        self.shard, self._log = TableShard(tables, seed=seed, rank=number, world=servers), StepLog(folder)
        self._candidates: Candidates | None = None
        self._ended: Exception | None = None  # why no more steps are made
        self._trainers, self._every = trainers, snapshot_every
        self._steps: dict[int, _Step] = {}
        self._changed = threading.Condition()
        self.step = self._log.first
        for part in self._log.snapshot():
            self._load(part)
        if (known := self._log.bases()) is not None:
            self.shard.gone.restore(*known)
        for header, arrays in self._log.steps():
            if "by" in header:
                self.shard.rebase(header["base"], by=header["by"])
                continue
            if header.get("step") != self.step:
                found = f"{folder}: the log has step {header.get('step')} where step {self.step} was to come"
                raise UserError(Problem(found, "remove the folder, and go on from a checkpoint of the run"))
            plan = EvictionPlan(*arrays) if header.get("evicts") else None
            at_pushes = range(0, 0 if plan else len(arrays), 4)
            pushes = [self._push_of(*arrays[at : at + 4]) for at in at_pushes]
            self._make_step(pushes, Commit(header["scale"], header["lr_factor"], plan))

    def decided(self) -> int:
        """Returns the number of steps that the trainers have decided on.

        Raises:
            RunFailed: a step could not be written.
        """
        with self._changed:
            self._check()
            return self.step

    def values(self, ids: np.ndarray, tables: np.ndarray, *, least: int, training: bool) -> Tensor:
        """Returns values [n, width] of keys, once ``least`` steps have been made."""
        with self._changed:
            self._wait_for(least)
            keys = Keys.of(ids, tables, self.shard.salts)
            if training:
                return self.shard.preview(keys)
            return self.shard.values(self.shard.find(keys))

    def prefetch(self, ids: np.ndarray, tables: np.ndarray) -> None:
        """Starts to load rows from the file."""
        with self._changed:
            self._check()
            self.shard.prefetch(Keys.of(ids, tables, self.shard.salts))

    def push(self, trainer: int, step: int, arrays: Sequence[np.ndarray]) -> None:
        """Takes a trainer's gradients; those of a step that has been made are a repetition."""
        with self._changed:
            if step >= self.step:
                self._steps.setdefault(step, _Step()).pushes[trainer] = self._push_of(*arrays)
                self._advance()

    def commit(self, trainer: int, step: int, commit: Commit) -> None:
        """Takes a trainer's decision on a step."""
        with self._changed:
            if step >= self.step:
                self._steps.setdefault(step, _Step()).commits[trainer] = commit
                self._advance()

    def candidates(self, what: str, arrays: list[np.ndarray], least: int) -> np.ndarray:
        """See `Candidates.answer`, once ``least`` steps have been made."""
        with self._changed:
            self._wait_for(least)
            return self._candidates_now().answer(what, arrays)

    def _candidates_now(self) -> Candidates:
        """Returns the candidates for a pass, which stay the same until the next step."""
        if self._candidates is None:
            self._candidates = Candidates(self.shard)
        return self._candidates

    def evicted(self, least: int) -> np.ndarray:
        """Returns `TableShard.evicted`, once ``least`` steps have been made."""
        with self._changed:
            self._wait_for(least)
            return self.shard.evicted

    def state(self, since: int | None, rows: int, least: int, is_base: bool) -> Iterator[tuple[str, TableState]]:
        """Yields the rows in parts, once ``least`` steps have been made; no step is made until all parts were read."""
        with self._changed:
            self._wait_for(least)
            if since is None and is_base:
                self._rebase(self.shard.step, "")
            yield from self.shard.state(since, rows=rows, is_base=False)

    def rebase(self, base: int | None, by: str, least: int) -> None:
        """Calls `TableShard.rebase`, once ``least`` steps have been made; it survives a restart of the server."""
        with self._changed:
            self._wait_for(least)
            self._rebase(base, by)

    def _rebase(self, base: int | None, by: str) -> None:
        self._log.append({"base": base, "by": by}, [])
        self.shard.rebase(base, by=by)

    def close(self, *, forget: bool) -> None:
        """Ends the shard; requests that wait for a step get an error.

        Args:
            forget: whether to empty the folder.
        """
        with self._changed:
            self._ended = ConnectionAbortedError("another run has begun")
            if forget:
                self._log.clear()
            self._log.close()
            self._changed.notify_all()

    def load(self, part: SparseState) -> None:
        """Loads rows of a state; `snapshot` makes them durable."""
        with self._changed:
            self._check()
            self._load(part)

    def snapshot(self) -> None:
        """Writes all rows, so that the steps before are not needed any more."""
        with self._changed:
            self._check()
            parts = self.shard.state(rows=2**20, is_base=False)
            states = (SparseState(self.shard.step, None, {name: table}) for name, table in parts)
            bases, evicted = self.shard.gone.saved()
            self._log.begin(states, first=self.step, bases=bases, evicted=evicted)
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """Returns the number of rows of each table."""
        with self._changed:
            self._check()
            return self.shard.counts()

    def _load(self, part: SparseState) -> None:
        self._candidates = None
        for name, table in part.tables.items():
            self.shard.load(name, table, step=part.step)

    def _wait_for(self, least: int) -> None:
        """Waits until ``least`` steps have been made."""
        self._changed.wait_for(lambda: self._ended is not None or self.step >= least)
        self._check()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _is_complete(self, step: int) -> bool:
        found = self._steps.get(step, _Step())
        return len(found.pushes) == len(found.commits) == self._trainers

    def _advance(self) -> None:
        """Makes the steps that are complete; after one that fails, no other is made.

        A step that cannot be written does not count. One that was written and then failed leaves the rows partly
        changed: the next start of the server makes it from the log.
        """
        self._check()
        self._changed.notify_all()
        try:
            self._make_steps()
        except Exception as error:
            is_explained = isinstance(error, UserError)
            self._ended = error if is_explained else RunFailed(f"a step could not be made: {typed_reason(error)}")
            self._changed.notify_all()
            if not is_explained and not isinstance(error, OSError):
                traceback.print_exception(error)  # in the server's output; trainers see its last line
            raise self._ended from None if is_explained else error

    def _make_steps(self) -> None:
        while self._is_complete(self.step):
            step = self._steps[self.step]
            pushes = [step.pushes[trainer] for trainer in range(self._trainers)]
            commit = step.commits[0]
            arrays = [a for p in pushes for a in (p.keys.ids, p.keys.tables, p.counts, p.grads.numpy())]
            header = {"step": self.step, "scale": commit.scale, "lr_factor": commit.lr_factor}
            if commit.plan is not None:
                header, arrays = {**header, "evicts": True}, [commit.plan.below, commit.plan.evicted]
            self._log.append(header, arrays)
            del self._steps[self.step]
            self._make_step(pushes, commit)
            if self.step % self._every == 0:
                self.snapshot()
            self._changed.notify_all()

    def _make_step(self, pushes: Sequence[Push], commit: Commit) -> None:
        self.step += 1
        if commit.plan is not None:
            self.shard.evict(self._candidates_now(), commit.plan)
        self._candidates = None
        if commit.scale is None:  # lookups have changed nothing
            return
        found = [self.shard.look_up(push.keys, push.counts) for push in pushes]
        rows = np.concatenate([some.unique[some.inverse] for some in found])
        unique, grads = self.shard.sum_by_row(rows, torch.cat([push.grads for push in pushes]))
        self.shard.update(unique, grads * commit.scale if commit.scale != 1 else grads, lr_factor=commit.lr_factor)
        self.shard.end_step()

    def _push_of(self, ids: np.ndarray, tables: np.ndarray, counts: np.ndarray, grads: np.ndarray) -> Push:
        return Push(Keys.of(ids, tables, self.shard.salts), counts, torch.from_numpy(np.array(grads)))
