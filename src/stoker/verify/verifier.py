"""Verification of layouts against one process, and of one process against a plain loop."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.state import Where
from stoker.errors import Problem, UserError
from stoker.job.layout import Layout, layout_of
from stoker.job.load_job import load_job
from stoker.launch.first_failure import RankFailed
from stoker.launch.process_pool import Pool
from stoker.models.families import family_of
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory
from stoker.verify.difference import Computed, TraceComparison, compare
from stoker.verify.dropout_masks import problem_of
from stoker.verify.layout_cases import Cell, reference_of
from stoker.verify.plain_run import as_plain, in_other_form, plain_job, run_plain, why_not
from stoker.verify.reference_run import ReferenceRun, widest_gap_midpoint
from stoker.verify.toy_job import FAULTY_STEPS, LayoutVariant, Twin
from stoker.verify.verdict import Check, Verdict
from stoker.verify.verify_run import Trace, run_and_trace

OWN = "one process"
BOUND = 1e-10  # in float64, for a model whose family sets no other
LEAST_NORM = 1e-6  # least norm of a meaningful gradient
TIMEOUT = 300.0  # seconds of one run
WAIT = 20.0  # timeout of a collective, seconds; on a busy machine ...
WAITS = 10  # ... this multiple of the duration of the single-process run
TIMED_OUT = "Timed out"  # part of gloo's error message


class Verifier:
    """Verifies layouts of one twin; single-process runs are cached.

    Args:
        pool: process pool, at least as large as the largest layout.
        bound: largest allowed difference; by default the family's.
        whole: whether to run more than the comparison with one process: the plain loop, restarts from checkpoints,
            dropout.
        fail_fast: whether to stop checking a layout at its first difference.
    """

    def __init__(
        self, twin: Twin, pool: Pool, *, bound: float | None = None, whole: bool = True, fail_fast: bool = False
    ) -> None:
        family = family_of(twin.config) if twin.config is not None else None
        self.twin, self.pool, self.whole, self.fail_fast = twin, pool, whole, fail_fast
        self.bound = bound if bound is not None else family.bound if family else BOUND
        self.references: dict[str, ReferenceRun] = {}
        self._wait = WAIT

    def verdict(self, cell: Cell) -> Verdict:
        """Runs a layout and compares it.

        Raises:
            UserError: the twin does not run in one process either.
        """
        begin = time.perf_counter()

        def uncompared(passed: bool | None, reason: str) -> Verdict:
            return Verdict(cell, layout, None, passed, reason, time.perf_counter() - begin)

        layout = None
        try:
            layout = layout_of(load_job(self.twin.job_file(cell)).job)
        except UserError as error:
            return uncompared(None, _words(error))
        if layout.world > self.pool.size:
            return uncompared(None, f"it needs {layout.world} processes, and {self.pool.size} are here")
        try:
            verdict = self._verdict(cell, layout)
        except RankFailed as error:
            reason = _words(error) + _cause(error)
            if TIMED_OUT in reason:
                reason = (
                    f"its processes wait for each other: a collective did not end within {self._wait:.0f} s ({reason})"
                )
            return uncompared(False, reason)
        except UserError as error:  # raised on every rank, whichever reported first
            return uncompared(None, re.sub(r"^rank \d+: ", "", _words(error)))
        except TimeoutError as error:
            return uncompared(False, str(error))
        return replace(verdict, seconds=time.perf_counter() - begin)

    def _verdict(self, cell: Cell, layout: Layout) -> Verdict:
        reference = self._reference(cell)
        self._wait = max(WAIT, WAITS * reference.seconds)
        checks: list[Check] = []
        for check in self._checks(cell, layout, reference):
            checks.append(check)
            if self.fail_fast and check.passed is False:
                break
        own = next((check for check in checks if check.name == OWN), None)
        others = tuple(check for check in checks if check is not own)
        failed = next((check for check in (own, *others) if check is not None and check.passed is False), None)
        reason = ""
        if failed is not None:
            reason = failed.reason if failed is own else f"{failed.name}: {failed.reason}"
        return Verdict(
            cell=cell,
            layout=layout,
            comparison=own.comparison if own else None,
            passed=failed is None,
            reason=reason,
            seconds=0.0,
            checks=others,
            facts=self._facts(reference),
        )

    def _checks(self, cell: Cell, layout: Layout, reference: ReferenceRun) -> Iterator[Check]:
        rows = not self.twin.task.rows.prompts  # a policy's samples are its own answers, which no plain loop generates
        if not rows:
            yield self._learning(reference)
        if self.whole:
            if rows:
                yield self._once(reference, "plain loop", lambda: self._plain(cell, reference))
            yield self._packing(reference)
            if rows:
                yield self._once(reference, "by steps", lambda: self._by_steps(cell, reference))
        path = self.twin.job_file(cell, LayoutVariant(clip=reference.clip))
        folder = _folder_of(path)
        folder.path.mkdir()
        with shared_memory(folder.path):  # in-memory copies outlive a run within it, as when a process dies
            run = self._run(path, cell, layout.world)
            yield self._compared(OWN, compare(run, reference.trace), run)
            yield self._replicas(run)
            if self.whole:
                yield from self._restarts(cell, layout, reference, folder)
        if self.whole and rows:
            yield self._left_out(cell, layout)
            if reference.trace.drops if self.twin.dropout is None else self.twin.dropout:
                yield self._dropout(cell, layout, reference)

    def _once(self, reference: ReferenceRun, name: str, check: Callable[[], Check]) -> Check:
        """Runs a check of the single-process run once, and caches it."""
        if name not in reference.checks:
            reference.checks[name] = check()
        return reference.checks[name]

    def _reference(self, cell: Cell) -> ReferenceRun:
        one = reference_of(cell)
        unclipped = self.twin.job_file(one, beside=cell)
        key = unclipped.read_text(encoding="utf-8").split("output:", maxsplit=1)[0]
        if key not in self.references:
            begin = time.perf_counter()
            run, path, clip = self._run(unclipped, one, 1), unclipped, 0.0
            seconds = time.perf_counter() - begin
            if self.twin.clips:
                clip = widest_gap_midpoint(run.grad_norms)
                path = self.twin.job_file(one, LayoutVariant(clip=clip), beside=cell)
                run = self._run(path, one, 1)
            self.references[key] = ReferenceRun(run, path, clip, seconds)
        return self.references[key]

    def _plain(self, cell: Cell, reference: ReferenceRun) -> Check:
        one, job, run = reference_of(cell), load_job(reference.path).job, reference.trace
        why = why_not(self.twin, job, run)
        if why is not None:
            return Check("plain loop", None, why)
        given = plain_job(self.twin, one, job, run)
        found: Computed = self.pool.run(run_plain, given, world=1, timeout=TIMEOUT)[0]
        return self._compared(
            "plain loop", compare(as_plain(job.tune, run), found, without=in_other_form(self.twin)), run
        )

    def _packing(self, reference: ReferenceRun) -> Check:
        """Checks that packed rows and the separate head give the model's own results; else one process runs without
        them.
        """
        if reference.trace.packed is None:
            return Check("packing", None, "its rows are padded")
        reason = "" if reference.trace.packed else "packed rows or a head of its own do not give what the model gives"
        return Check("packing", reference.trace.packed, reason)

    def _learning(self, reference: ReferenceRun) -> Check:
        """Checks that a policy's answers differ in score; else every layout would compute a gradient of 0."""
        learns = max(reference.trace.grad_norms) > LEAST_NORM
        return Check("scores differ", learns, "" if learns else "all answers have one score, so nothing is learnt")

    def _by_steps(self, cell: Cell, reference: ReferenceRun) -> Check:
        """Runs the same job with its length in ``steps``: only its last step differs, as it has a whole batch."""
        one, last, batch = reference_of(cell), self.twin.steps(cell), cell.batch["batch"]
        path = self.twin.job_file(one, LayoutVariant(clip=reference.clip, by_steps=True), beside=cell)
        found = self._run(path, one, 1)
        if found.numbers.get((last, "samples")) != last * batch:
            return Check("by steps", False, f"{last} steps do not take {last} x {batch} samples")
        return self._compared("by steps", compare(_before(last, found), _before(last, reference.trace)), found)

    def _replicas(self, run: Trace) -> Check:
        found = run.replicas
        assert found is not None
        reason = "" if found.size == 0 else f"{found.where} differs by {found.size:.2e}, and copies must be equal"
        return Check("replicas", not reason, reason)

    def _restarts(self, cell: Cell, layout: Layout, reference: ReferenceRun, folder: RunFolder) -> Iterator[Check]:
        """Resumes in one process, from in-memory copies and from a checkpoint, and under the layout."""
        step = self.twin.saves_at(cell)
        if step >= self.twin.steps(cell) - 1:
            return
        one, variant, expected = reference_of(cell), LayoutVariant(clip=reference.clip), reference.trace
        _forget_after(folder, step)
        again = self.twin.job_file(one, variant, beside=cell, output=folder.path)
        yield self._went_on("from memory", self._run(again, one, 1), expected, self.twin.steps(cell) - 1, "memory")
        there = self.twin.job_file(one, variant, beside=cell)
        yield self._continued("its checkpoint in one process", folder, there, one, 1, expected, step)
        here = self.twin.job_file(cell, variant)
        yield self._continued(
            "one process' checkpoint", _folder_of(reference.path), here, cell, layout.world, expected, step
        )

    def _continued(
        self, name: str, of: RunFolder, path: Path, cell: Cell, world: int, expected: Trace, step: int, **how: Any
    ) -> Check:
        """Resumes the job at ``path`` from a checkpoint of a run."""
        folder = _folder_of(path)
        shutil.copytree(of.path, folder.path)
        _forget_after(folder, step)
        return self._went_on(name, self._run(path, cell, world, **how), expected, step, "disk")

    def _went_on(self, name: str, run: Trace, expected: Trace, step: int, where: Where) -> Check:
        steps = {at for at, key in run.numbers if key == "loss"}
        if run.resumed != where or min(steps, default=0) != step + 1:
            return Check(name, False, f"it did not go on from the state of step {step} ({where})")
        return self._compared(name, compare(run, expected, after=step), run)

    def _dropout(self, cell: Cell, layout: Layout, reference: ReferenceRun) -> Check:
        """Checks the dropout of each process, and that it is the same after a restart and with recomputation."""
        path = self.twin.job_file(cell, LayoutVariant(clip=reference.clip, dropout=True))
        run = self._run(path, cell, layout.world, dropout=True)
        why = problem_of(run.draws, layout, self.twin.dropout)
        key = (0, "evaluation loss")
        if not why and compare(_only(run, key), _only(reference.trace, key)).first_beyond(self.bound):
            why = "the model is evaluated otherwise than without dropout"
        step = self.twin.saves_at(cell)
        if why or step >= self.twin.steps(cell):
            return Check("dropout", not why, why or "")
        variant = LayoutVariant(clip=reference.clip, dropout=True, parallel={"recompute": "none"})
        again = self.twin.job_file(cell, variant)
        return self._continued("dropout", _folder_of(path), again, cell, layout.world, run, step, dropout=True)

    def _left_out(self, cell: Cell, layout: Layout) -> Check:
        """Checks that a step with a non-finite gradient or loss on one process changes nothing, and that the next one
        trains.
        """
        name, path = "not finite", self.twin.job_file(cell, LayoutVariant(faulty=True))
        found = self._run(path, cell, layout.world, faulty=True)
        before, *after = (found.numbers.get((step, "evaluation loss"), math.nan) for step in range(FAULTY_STEPS + 1))
        for what, loss in zip(("gradient", "loss"), after, strict=False):
            if not abs(loss - before) <= self.bound:
                return Check(name, False, f"a step whose {what} is not finite on one process changes the model")
        if not abs(after[-1] - before) > self.bound:
            return Check(name, False, "nothing is trained after a step that is not finite")
        return Check(name, True)

    def _compared(self, name: str, comparison: TraceComparison, run: Trace) -> Check:
        beyond = comparison.first_beyond(self.bound) or ""
        if beyond and run.batch_norm:
            beyond += "; its BatchNorm takes its statistics over the samples of one pass, which the layout changes"
        return Check(name, not beyond, beyond, comparison)

    def _facts(self, reference: ReferenceRun) -> tuple[str, ...]:
        if not reference.clip:
            return ()
        norms = reference.trace.grad_norms
        binds = sum(norm > reference.clip for norm in norms)
        return (f"clipping at {reference.clip:.3g} binds in {binds} of {len(norms)} steps",)

    def _run(self, path: Path, cell: Cell, world: int, *, dropout: bool = False, faulty: bool = False) -> Trace:
        last = self.twin.steps(cell)
        given = (str(path), self.pool.device, last, dropout, faulty)
        found = self.pool.run(run_and_trace, *given, world=world, timeout=TIMEOUT, wait=self._wait)[0]
        assert found is not None
        return found


def _before(step: int, run: Trace) -> Computed:
    return Computed({key: value for key, value in run.numbers.items() if key[0] < step}, {}, {})


def _only(run: Trace, key: tuple[int, str]) -> Computed:
    return Computed({key: run.numbers[key]} if key in run.numbers else {}, {}, {})


def _folder_of(job_file: Path) -> RunFolder:
    return RunFolder(job_file.parent / load_job(job_file).job.output)


def _forget_after(folder: RunFolder, step: int) -> None:
    Store(folder.checkpoints).forget_after(step)


def _words(error: UserError) -> str:
    """Formats the problems without their places, which are in a file that the user does not know."""

    def words(problem: Problem) -> str:
        message = re.sub(r" \(see also [^)]*\)", "", problem.message)
        return f"{message}; {problem.suggestion}" if problem.suggestion else message

    return " ".join(". ".join(words(problem) for problem in error.problems if not problem.repeats).split())


def _cause(error: RankFailed) -> str:
    """Returns the cause of a pipeline stage's error: the schedule's own message only names the stage."""
    first, *following = "".join(getattr(error, "__notes__", ())).split("\nThe above exception was the direct cause")
    return f" ({first.strip().splitlines()[-1]})" if following else ""
