"""Fault rehearsal of a job: an undisturbed run and one with faults, in real processes, and their comparison."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.named_files import named_files
from stoker.data.sources import open_source
from stoker.errors import Problem, RunFailed, UserError
from stoker.job import LoadedJob
from stoker.job.layout import layout_of
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of
from stoker.models.tuning.quantise import device_for
from stoker.rehearse.fault_report import RESTARTED, FaultEffect, fault_effects
from stoker.rehearse.loopback_nodes import train_on_loopback
from stoker.rehearse.random_faults import ON_ONE_NODE
from stoker.rehearse.run_equality import Equality, compare
from stoker.resilience.fault_injection import KINDS, Fault, Kind, write_faults
from stoker.runs.goodput import Goodput, goodput
from stoker.runs.listing import summarise
from stoker.runs.run_folder import RunFolder

HANG = 10.0  # seconds of silence after which a process counts as hung, unless the job says so


@dataclass(frozen=True)
class Trial:
    """Result of a rehearsal.

    Attributes:
        exit_code: exit code of the run with faults.
        message: last error line of that run, if it did not reach its end.
        goodput: goodput of the run with faults.
    """

    calm: RunFolder
    disturbed: RunFolder
    exit_code: int
    message: str
    effects: tuple[FaultEffect, ...]
    equality: Equality
    goodput: Goodput | None

    @property
    def survived(self) -> bool:
        """Whether the end equals that of the undisturbed run."""
        return self.exit_code == 0 and self.equality.holds


class Rehearsal:
    """A job and the folder in which it is rehearsed.

    Args:
        path: path of the job file.
        overrides: as given on the command line.
        say: prints progress for the user.
        nodes: number of nodes of the run with faults, all on this machine.
    """

    def __init__(
        self,
        loaded: LoadedJob,
        path: str,
        overrides: Sequence[str],
        *,
        base: Path,
        say: Callable[[str], None],
        nodes: int = 1,
    ) -> None:
        self._loaded, self._path, self._overrides, self._say = loaded, path, list(overrides), say
        self.folder = base / f"{loaded.job.output}-chaos"
        self._base = base
        self.world = layout_of(loaded.job).world
        self.nodes = nodes

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of faults that the job's fault policy survives."""
        job, rank = self._loaded.job, self.world - 1
        kinds = KINDS if self.nodes > 1 else ON_ONE_NODE
        return [kind for kind in kinds if _problem(job, Fault(kind, 1, rank), self.world, self.nodes) is None]

    def undisturbed(self) -> RunFolder:
        """Returns the run without faults; an earlier one is reused where job and data are the same.

        Raises:
            RunFailed: it does not reach its end.
        """
        folder = RunFolder(self.folder / f"undisturbed-{self._fingerprint()}")
        if summarise(folder).state == "done":
            self._say(f"undisturbed run: that of an earlier time, {folder.path}")
            return folder
        self._say(f"undisturbed run, in {folder.path}")
        code, message = self._train(folder.path, [])
        if code:
            raise RunFailed(f"the job does not reach its end without faults either: {message}")
        return folder

    def disturbed(self, calm: RunFolder, faults: Sequence[Fault]) -> Trial:
        """Runs the job with faults and compares.

        Raises:
            UserError: the run has no such step, or another rehearsal uses the folder.
        """
        job, steps = self._loaded.job, len(calm.read_metrics())
        _check_steps(faults, range(1, steps + 1))
        folder = RunFolder(self.folder / "disturbed")
        if folder.path.exists():
            with folder.take():
                shutil.rmtree(folder.path)
        write_faults(folder, faults)
        changes = [f"faults.hang={HANG:g}"] if job.faults.hang == "auto" else []
        self._say(f"with {len(faults)} faults, in {folder.path}")
        code, message = self._train(folder.path, changes, nodes=self.nodes)
        precision = device_for(job).precision
        events = folder.read_events()
        worlds = {event["world"] for event in events if event["event"] == "group"}
        same = len(worlds) < 2 and not any(event["event"] == "shrunk" for event in events)
        return Trial(
            calm=calm,
            disturbed=folder,
            exit_code=code,
            message=message,
            effects=tuple(fault_effects(folder, faults)),
            equality=compare(calm, folder, precision=precision, same_layout=same),
            goodput=goodput(folder),
        )

    def check(self, faults: Sequence[Fault]) -> None:
        """Checks that the job can meet these faults, as far as this is known before a run.

        Raises:
            UserError: a process does not exist, or the job's fault policy does not survive a fault.
        """
        found = dict.fromkeys(_problem(self._loaded.job, fault, self.world, self.nodes) for fault in faults)
        if problems := [self._loaded.problem(*words) if words[0] else Problem(*words[1:]) for words in found if words]:
            raise UserError(*problems)
        if self._loaded.job.steps is not None:
            _check_steps(faults, range(self._loaded.job.steps + 1))  # 0 where the command line names none

    def _train(self, output: Path, changes: Sequence[str], nodes: int = 1) -> tuple[int, str]:
        """Runs ``stoker train`` in separate processes; returns the exit code and the last error line."""
        own = [f"output={output}", "checkpoint.to=null", "export.sync=null"]  # leaves files and stores of others alone
        words = [self._path, *self._overrides, *changes, *own]
        if nodes > 1:
            stated = self._loaded.job.faults.nodes is not None
            options = [] if stated else ["--nodes", str(nodes)]
            return train_on_loopback([*words, *options], count=nodes, base=self._base)
        command = [sys.executable, "-P", "-m", "stoker", "train", *words, "--json"]
        ended = subprocess.run(command, cwd=self._base, capture_output=True, text=True, check=False)
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return ended.returncode, lines[-1] if lines else f"exit code {ended.returncode}"

    def _fingerprint(self) -> str:
        """Returns a digest of all that determines the end: the job without its fault policy, its data, its
        model, and the other files and runs that it names.
        """
        job, base = self._loaded.job, self._base
        left_out = {
            "output": True,
            "faults": True,
            "checkpoint": {"to", "background", "memory", "keep", "keep_every", "full_every"},
        }
        blocks = (*job.data, *job.evaluate.data)
        seen = [open_source(block, base).fingerprint() for block in blocks]
        named = ((name, path.stat()) for name, path in sorted(named_files(self._loaded, base).found.items()))
        seen += [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in named]
        if task_of(job).runs_code(job):  # the code may have changed, so it never matches
            seen.append(str(time.time_ns()))
        text = json.dumps([job.model_dump(mode="json", exclude=left_out), seen])  # type: ignore[arg-type]
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _problem(job: ResolvedJob, fault: Fault, world: int, nodes: int) -> tuple[str, str, str] | None:
    """Returns why the job's policy does not survive a fault: (key, message, suggestion)."""
    if fault.node and (not fault.node.isdecimal() or int(fault.node) >= nodes):
        return "", f"{fault}: there is no node {fault.node}", f"there are {nodes} nodes, counted from 0"
    if fault.rank >= world:
        there = f"the job has {world} process{'es' * (world > 1)}, and ranks count from 0"
        return "", f"{fault}: there is no rank {fault.rank}", there
    if fault.kind in RESTARTED and not job.faults.restarts:
        return "faults.restarts", "a process that dies ends the run", "write 3, or more"
    if fault.kind == "nan" and job.faults.not_finite != "roll-back":
        stops = job.faults.not_finite == "stop"
        what = "ends the run there" if stops else "leaves the step out, so the end is another"
        instead = "write roll-back, which tries the step once more first, or leave out --nan"
        return "faults.not_finite", f"`{job.faults.not_finite}` {what}", instead
    if fault.kind == "fill-disk" and not job.checkpoint.background:
        return "checkpoint.background", "a disk that is full then ends the run", "write true, or leave out --fill-disk"
    return None


def _check_steps(faults: Sequence[Fault], steps: range) -> None:
    if late := [fault for fault in faults if fault.step not in steps]:
        problems = (Problem(f"{fault}: the job has {steps.stop - 1} steps", "steps count from 1") for fault in late)
        raise UserError(*problems)
