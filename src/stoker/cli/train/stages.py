"""Train the stages of a job file one after another; the same command goes on where it was stopped or killed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stoker.cli.output.run_report import answer_of, say_ending
from stoker.cli.preflight import open_stages
from stoker.cli.train.data_ahead import check_data_ahead
from stoker.cli.train.openmp_threads import patient_threads
from stoker.cli.train.start_over import put_run_aside, start_fresh
from stoker.cli.train.start_run import spec_of, trained
from stoker.errors import CannotRun, Problem, UserError
from stoker.files import replace_file
from stoker.job.load_job import LoadedJob
from stoker.job.stage import FROM, Stage, weights_folder
from stoker.job.stages import StagedJob, read_stages
from stoker.job.task_spec import task_of
from stoker.node_cache.job_urls import urls_of
from stoker.runs.run_folder import RunFolder
from stoker.runs.stage_runs import RECORD, record_of

if TYPE_CHECKING:
    from stoker.launch.cluster_env import RankInfo
    from stoker.launch.run_spec import RunSpec
    from stoker.train.records.lineage import Lineage, Standing
    from stoker.train.run_result import RunResult

WEIGHTS, LOOK = 3600, 0.5  # seconds: the longest wait for the weights of an earlier stage, and between two looks


class StageRunner(Protocol):
    """Trains stages, on this machine or on several nodes.

    Attributes:
        alone: whether no other node reads the data at URLs at the same time, which nodes exchange while a stage starts.
        first: whether this process changes shared files: sets earlier runs aside, and merges weights of earlier stages.
        command: words that continue the stages; empty for `stoker train` with the same arguments.
    """

    alone: bool
    first: bool
    command: Sequence[str]

    def train(
        self, stage: Stage, loaded: LoadedJob, begun: Callable[[], None], *, quiet: bool
    ) -> tuple[RunSpec, RunResult]:
        """Trains a stage.

        Args:
            begun: called before training, while the run's folder is locked.

        Returns:
            The run's spec and its result.

        Raises:
            Ended: as `stoker.cli.train.start_run.trained` does.
        """


class LocalStageRunner:
    """Trains stages in processes of this machine; see `StageRunner`."""

    alone = first = True
    command: Sequence[str] = ()

    def train(
        self, stage: Stage, loaded: LoadedJob, begun: Callable[[], None], *, quiet: bool
    ) -> tuple[RunSpec, RunResult]:
        spec = spec_of(loaded, None, quiet=quiet)
        return spec, trained(spec, begun=begun)


def train_stages(arguments: argparse.Namespace, rank_info: RankInfo | None, runner: StageRunner | None = None) -> int:
    """Trains each chosen stage that is not done with its current inputs; returns the exit code of `stoker train`.

    Args:
        runner: trains a stage; `LocalStageRunner` by default.

    Raises:
        UserError: a stage has a problem, found before training starts; or a stage that is left out is not done.
    """
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()  # a stage that is done is looked at in this process
    if rank_info is not None:
        hint = "start `stoker train` itself: it starts the processes of each stage"
        raise UserError(Problem("a job with stages cannot be started by torchrun or srun", hint))
    runner = runner or LocalStageRunner()
    staged = read_stages(arguments.job, arguments.overrides)
    chosen = staged.chosen(only=arguments.only, begin=arguments.begin)
    opened = open_stages(chosen, "train")
    if any(task_of(loaded.job).rows.prompts for loaded in opened):
        patient_threads()
    _check_left_out(staged, chosen)
    base, quiet = Path.cwd(), arguments.json
    check_data_ahead(_later(chosen, opened, base, runner, fresh=arguments.fresh), base)
    answers: list[dict[str, Any]] = []
    for stage, named in zip(chosen, opened, strict=True):
        output, last = base / stage.output, stage is chosen[-1]
        if arguments.fresh:
            start_fresh(output, named.job.checkpoint.to, base)
        lineage, standing, loaded = _standing(staged, stage, base)
        if not quiet:
            print(f"{'' if stage is chosen[0] else chr(10)}{_heading(staged, stage, standing)}", flush=True)
        if standing.state == "done":
            answers.append({"stage": stage.name, "state": "done", "run": str(output), "unchanged": True})
            continue
        if standing.state == "changed" and runner.first:
            put_run_aside(output, loaded.job.checkpoint.to, base)
        if FROM in stage.needs and not runner.first:
            _wait_for_weights(staged, stage, lineage, base)
        elif FROM in stage.needs and (line := _merge(staged, stage, lineage, base)) and not quiet:
            print(f"weights of {stage.needs[FROM]}: {line}", flush=True)

        def begun(output: Path = output, lineage: Lineage = lineage) -> None:
            folder, root = RunFolder(output), base / staged.root
            folder.write_json(folder.lineage, {**lineage.as_json(), "stages": os.path.relpath(root, output)})
            root.mkdir(parents=True, exist_ok=True)
            replace_file(root / RECORD, json.dumps(record_of(staged), indent=2) + "\n")

        spec, ending = runner.train(stage, loaded, begun, quiet=quiet)
        answers.append({"stage": stage.name, **answer_of(spec.output, ending), "unchanged": False})
        if not quiet:
            say_ending(spec, ending, shlex.join(runner.command or _command(arguments)), last=last)
        if ending.state != "done":
            _print_answers(answers, staged, quiet=quiet)
            return ending.exit_code
    _print_answers(answers, staged, quiet=quiet)
    return 0


def _later(
    chosen: Sequence[Stage], opened: Sequence[LoadedJob], base: Path, runner: StageRunner, *, fresh: bool
) -> list[tuple[Stage, LoadedJob]]:
    """Returns the stages that train after another one and whose data this process may read before it."""
    waiting = [
        (stage, loaded)
        for stage, loaded in zip(chosen, opened, strict=True)
        if fresh or not RunFolder(base / stage.output).is_done()
    ]
    return [(stage, loaded) for stage, loaded in waiting[1:] if runner.alone or not urls_of(loaded.job)]


def _standing(staged: StagedJob, stage: Stage, base: Path) -> tuple[Lineage, Standing, LoadedJob]:
    """Returns the lineage and state of the stage's run, and its job with the runs of earlier stages filled in."""
    from stoker.train.records.lineage import lineage_of, standing_of, weights_digest

    named = [other for other in staged.stages if other.name in stage.needs.values()]
    weights = {other.name: weights_digest(other.output, base) for other in named}
    loaded = stage.load(trained=weights)
    lineage = lineage_of(stage, loaded, weights, base)
    return lineage, standing_of(RunFolder(base / stage.output), lineage, loaded.job), loaded


def _merge(staged: StagedJob, stage: Stage, lineage: Lineage, base: Path) -> str:
    from stoker.checkpoint.export.stage_weights import stage_weights

    name = stage.needs[FROM]
    earlier = staged.stage(name)
    return stage_weights(earlier.output, lineage.inputs[f"stage {name}"], earlier.load().job, base)


def _wait_for_weights(staged: StagedJob, stage: Stage, lineage: Lineage, base: Path) -> None:
    """Waits until another node has written a stage's initial weights.

    Raises:
        CannotRun: they were not written in time.
    """
    name = stage.needs[FROM]
    earlier = staged.stage(name)
    folder = base / weights_folder(earlier.output, lineage.inputs[f"stage {name}"], base)
    until = time.monotonic() + WEIGHTS
    while not folder.is_dir():
        if time.monotonic() > until:
            message = f"stage {stage.name} starts from {folder}, which the first node has not written in {WEIGHTS} s"
            raise CannotRun(
                Problem(message, "see the first node's log; the runs must be on storage that all nodes share")
            )
        time.sleep(LOOK)


def _check_left_out(staged: StagedJob, chosen: Sequence[Stage]) -> None:
    """Raises UserError if a chosen stage needs an earlier one that is neither chosen nor done."""
    names = {stage.name for stage in chosen}
    for stage in chosen:
        for key, name in stage.needs.items():
            earlier = staged.stage(name)
            if name not in names and not RunFolder(Path.cwd() / earlier.output).is_done():
                message = f"stage {stage.name} needs stage {name} (`{key}`), which is not done"
                raise UserError(Problem(message, f"train it first: --only {name}, or leave the option out"))


def _heading(staged: StagedJob, stage: Stage, standing: Standing) -> str:
    words = {
        "none": "starts",
        "begun": "resumes",
        "done": "done, unchanged",
        "changed": f"starts over: {'; '.join(standing.why[:3])}",
    }[standing.state]
    return f"stage {stage.index + 1} of {len(staged.stages)}, {stage.name}: {words}"


def _command(arguments: argparse.Namespace) -> list[str]:
    options = [
        word
        for option, name in (("--only", arguments.only), ("--from", arguments.begin))
        if name
        for word in (option, name)
    ]
    return ["stoker", "train", arguments.job, *arguments.overrides, *options]


def _print_answers(answers: list[dict[str, Any]], staged: StagedJob, *, quiet: bool) -> None:
    if quiet:
        print(json.dumps({"state": answers[-1]["state"], "run": staged.root, "stages": answers}))
