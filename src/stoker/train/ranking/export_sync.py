"""``export.sync``: a store that follows a run. Changed rows and the tower are sent to it during training."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from stoker.checkpoint.object_collectives import by_first, rank, run_on_all_ranks
from stoker.errors import RunFailed, UserError
from stoker.online_store.row_backends import StoreError
from stoker.online_store.store_version import TableDelta
from stoker.online_store.store_writers import StoreWriter, keep_newest, store_errors
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import StepMetrics
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.stored_embeddings import stored_tables
from stoker.train.hooks import Hook
from stoker.train.ranking.exported_tower import WEIGHTS, weights_of
from stoker.train.ranking.initial_export import ASKER, InitialExport, delta_of
from stoker.train.ranking.ranking_task import RankingTask
from stoker.train.ranking.store_thread import StoreThread

FILE = "export_sync.jsonl"  # in the run's folder: a line for each update
SECONDS = 10.0  # where a job says neither seconds nor steps
KEPT = 3  # versions kept
LOADING = 1.0  # seconds per step spent on writing rows of a first version
PATIENCE = 300.0  # seconds before a store's call for a first version or a run's last update times out
RETRY, DOUBLINGS = 1.0, 6  # seconds until the next attempt after a failure; doubled after each further one, six times
PAUSE = 30.0  # seconds that an evaluation or a checkpoint waits for an update in flight

T = TypeVar("T")


@dataclass(frozen=True)
class _Update:
    """One update of the store.

    Attributes:
        reaches: version of the tables that the store has afterwards.
        oldest: end of the first step in it, seconds since 1970.
    """

    version: int
    step: int
    reaches: int
    oldest: float
    deltas: list[TableDelta]
    manifest: dict[str, Any]
    files: dict[str, bytes]


class ExportSync:
    """Sends changes from the training processes: each its own rows, the first process the tower as well.

    A first version has all rows, written in parts after steps, and becomes current once it is whole; updates follow,
    sent in a thread. Rows that a store did not accept are part of the next update, which waits longer after each
    failure. A store that does not answer is waited for up to a timeout, and the run continues without it. A run that
    goes back to an earlier state, or whose version has been dropped, makes a new version. A version rolled back by hand
    stays rolled back.

    Args:
        manifest: describes the export at a step.
        files: files of a version beside the tower's weights.
        every_seconds: age of a change at which it is sent; None with ``every_steps``.
    """

    def __init__(
        self,
        task: RankingTask,
        writer: StoreWriter,
        *,
        manifest: Callable[[int], dict[str, Any]],
        files: Callable[[], Mapping[str, bytes]] = dict,
        every_seconds: float | None,
        every_steps: int | None,
    ) -> None:
        self._task, self._writer, self._manifest, self._files = task, writer, manifest, files
        self._every_seconds = every_seconds if every_seconds or every_steps else SECONDS
        self._every_steps = every_steps
        self._version: int | None = None  # of the store
        self._updates = self._reached = self._step = 0
        self._id = ""  # of the version
        self._tables: Embeddings | None = None  # those of the version
        self._oldest: float | None = None  # end of the first step that has not been sent
        self._took = self._sent_oldest = 0.0
        self._pauses: dict[str, float] = {}  # seconds of the last one of each kind
        self._paused: tuple[str, float] | None = None  # kind and begin
        self._load: InitialExport | None = None
        self._thread = StoreThread(writer.place)
        self._pushed: Future[_Update] | None = None
        self._in_vain = 0.0  # seconds already waited for the update in flight
        self._is_gone = False
        self._failures = 0  # since the last success, on any process
        self._next_try = 0.0  # on the monotonic clock
        self._was_reported = False
        task.before_pause = self.before_pause

    def hook(self) -> Hook:
        """Returns the loop's hook."""
        return Hook(after_step=self.after_step, after_run=self.finish)

    def after_step(self, metrics: StepMetrics) -> None:
        """Sends the changes that are due. A collective."""
        now = time.time()
        self._end_pause(now)
        self._step = metrics.step
        self._oldest = self._oldest or now
        if self._is_due(now):
            self._send()

    def before_pause(self, kind: str) -> None:
        """Sends changes that would exceed their age limit before the next step, if this pause takes as long as the last
        one of its kind. A collective.
        """
        now = time.time()
        self._end_pause(now)
        self._paused = kind, now
        if self._version is None or self._every_seconds is None:
            return
        age = now - (self._oldest or now) + self._pauses.get(kind, 0.0)
        if any(run_on_all_ranks(lambda: self._oldest is not None and age >= self._limit)):
            self._settle(wait=PAUSE)
            self._send()

    def _end_pause(self, now: float) -> None:
        if self._paused is not None:
            kind, began = self._paused
            self._pauses[kind], self._paused = now - began, None

    def finish(self) -> None:
        """Sends the rest and waits for it. A collective."""
        if self._settle(wait=PATIENCE) and any(run_on_all_ranks(lambda: self._oldest is not None)):
            self._send(waits=False)
            while self._load is not None:
                self._send(waits=False)
            self._settle(wait=PATIENCE)

    @property
    def _limit(self) -> float:
        """Age at which a change is sent, so that it arrives in time."""
        assert self._every_seconds is not None
        return max(0.0, self._every_seconds - self._took)

    def _is_due(self, now: float) -> bool:
        if self._load is not None or (self._version is None and self._tables is None):
            return True
        if self._every_steps is not None:
            return self._step % self._every_steps == 0
        oldest = self._oldest or now
        return by_first(lambda: now - oldest >= self._limit)

    def _send(self, *, waits: bool = True) -> None:
        """Sends changes, unless the previous update is still in flight, or has failed and the next attempt waits."""
        if not self._settle():
            return
        if waits and self._failures and by_first(lambda: time.monotonic() < self._next_try):
            return
        tables = self._task.tables
        if self._version is None or self._tables is not tables or tables.version < self._reached:
            self._publish(tables)
            return
        state = tables.state(since=self._reached)
        numbers = stored_tables(tables.tables)
        deltas = [delta_of(numbers[name], table) for name, table in state.tables.items()]
        files = {WEIGHTS: weights_of(self._task.model)}
        self._updates += 1
        manifest = self._described()
        update = _Update(
            version=self._version,
            step=self._step,
            reaches=tables.version,
            oldest=self._oldest or time.time(),
            deltas=deltas,
            manifest=manifest,
            files=files,
        )
        self._oldest, self._sent_oldest = None, update.oldest
        self._pushed = self._thread.submit(lambda: self._push(update))

    def _described(self) -> dict[str, Any]:
        own = {"id": self._id, "updates": self._updates, "updated": round(time.time(), 3)}
        return self._manifest(self._step) | own

    def _publish(self, tables: Embeddings) -> None:
        """Makes a version of all rows, a part of them after each step, and makes it current."""
        if any(run_on_all_ranks(lambda: self._thread.is_busy)):  # with a call that timed out
            return
        began, writer = time.time(), self._writer

        def do(call: Callable[[], T]) -> T:
            return self._thread.do(call, seconds=PATIENCE)

        try:
            with store_errors(self._writer.place):
                if self._load is None or self._load.tables is not tables:
                    self._load = InitialExport(by_first(lambda: do(writer.begin)), tables, self._oldest or began)
                load = self._load
                if not all(run_on_all_ranks(lambda: load.go_on(lambda *row: do(lambda: writer.put(*row)), LOADING))):
                    return
                files = {**self._files(), WEIGHTS: weights_of(self._task.model)}
                self._updates, self._id = 0, secrets.token_hex(8)
                rows = sum(run_on_all_ranks(lambda: load.rows))
                by_first(lambda: do(lambda: self._switch(load.version, files)))
        except UserError as error:
            if self._tables is None:
                raise
            self._load = None  # its partial data is removed later
            self._failed(error)
            self._back_off()
            return
        self._version, self._tables, self._reached, self._is_gone = load.version, tables, tables.version, False
        self._load, self._oldest, self._failures = None, None, 0
        self._record(rows=rows, removed=0, seconds=time.time() - load.began, stale=time.time() - load.oldest)

    def _switch(self, version: int, files: Mapping[str, bytes]) -> None:
        self._writer.seal(version, {**self._described(), "files": sorted(files)}, files)
        self._writer.switch(version)
        keep_newest(self._writer, KEPT)

    def _push(self, update: _Update) -> _Update:
        """Sends an update; runs in the thread."""
        began = time.time()
        if rank() == 0:
            self._writer.update(update.version, update.deltas, update.manifest, update.files)
        else:
            self._writer.change(update.version, update.deltas)
        now = time.time()
        self._took = now - began
        rows, removed = (sum(len(getattr(d, name)) for d in update.deltas) for name in ("ids", "removed"))
        self._record(rows=rows, removed=removed, seconds=self._took, stale=now - update.oldest, update=update)
        return update

    def _settle(self, *, wait: float = 0.0) -> bool:
        """Processes the result of the last update; returns False while it is in flight. A collective.

        Args:
            wait: timeout in seconds; an update that exceeded a timeout this long before is not waited for again.
        """
        pushed = self._pushed
        if pushed is not None and wait > self._in_vain:
            try:
                self._thread.wait(pushed, seconds=wait)
            except RunFailed as silence:
                self._in_vain = wait
                self._failed(silence)
        if not all(run_on_all_ranks(lambda: pushed is None or pushed.done())):
            return False
        self._pushed, self._in_vain = None, 0.0
        error = pushed.exception() if pushed is not None else None
        if pushed is not None:
            if error is None:
                self._reached = pushed.result().reaches
                self._task.tables.rebase(self._reached, by=ASKER) if self._tables is self._task.tables else None
            else:
                self._is_gone = isinstance(error, StoreError)
                self._oldest = self._sent_oldest
                self._failed(error)
        outcomes = run_on_all_ranks(lambda: (self._is_gone, pushed is not None, error is not None))
        if any(is_gone for is_gone, _, _ in outcomes):
            self._version = None
        elif any(failed for _, _, failed in outcomes):
            self._back_off()
        elif any(sent for _, sent, _ in outcomes):
            self._failures = 0
        return True

    def _back_off(self) -> None:
        """Delays the next attempt, after a failure on any process: each takes all changes since the last success."""
        self._next_try = time.monotonic() + RETRY * 2 ** min(self._failures, DOUBLINGS)
        self._failures += 1

    def _failed(self, error: BaseException) -> None:
        """Records an error of the store; the changes are sent again."""
        try:
            with store_errors(self._writer.place):
                raise error
        except UserError as known:
            message = str(known)
        if self._task.folder is not None:
            with suppress(UserError):
                RunFolder(self._task.folder).event("export_sync_failed", step=self._step, error=message)
        if not self._was_reported:
            note = "training goes on, and what the store lacks is sent once it takes it"
            print(f"export.sync: {message}; {note}", file=sys.stderr, flush=True)
        self._was_reported = True

    def _record(self, *, rows: int, removed: int, seconds: float, stale: float, update: _Update | None = None) -> None:
        if self._task.folder is None:
            return
        step, version = (update.step, update.version) if update else (self._step, self._version)
        line = {"step": step, "version": version, "update": update.manifest["updates"] if update else 0}
        line |= {"rows": rows, "removed": removed, "seconds": round(seconds, 4), "stale": round(stale, 4)}
        with suppress(OSError), (self._task.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "time": round(time.time(), 3)}) + "\n")
