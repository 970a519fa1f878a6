"""Start a job on other machines, over ssh, Slurm, Ray or Kubernetes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.preflight import open_job, open_stages
from stoker.errors import Problem, UserError
from stoker.job import LoadedJob
from stoker.job.document.yaml_document import COMMAND_LINE, Mark
from stoker.job.keys.key_paths import TARGET, KeyPath
from stoker.job.run_records import is_of_run
from stoker.job.stages import StagedJob, stages_if_any
from stoker.job.targets import LOCAL

if TYPE_CHECKING:
    from stoker.cluster.chosen_target import ChosenTarget
    from stoker.cluster.record import Record
    from stoker.cluster.submission import Submission
    from stoker.cluster.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker submit``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    parser.add_argument(
        "--on", metavar="TARGET", help="target file, or name of a target in targets.yaml (default: `target` of the job)"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the run (default: the name of its output folder)")
    parser.add_argument("--include", metavar="HOSTS", help="ssh: use only these hosts or slots, as in gpu1:0,2@gpu2")
    parser.add_argument(
        "--exclude", metavar="HOSTS", help="ssh: use all hosts or slots except these, as in gpu1:3@gpu4"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Submits; returns 0 once the target has accepted the job."""
    from stoker.cluster.record import save_record
    from stoker.cluster.target import open_target

    if arguments.dry_run and arguments.json:
        message = "--dry-run prints what would be sent, and --json the record of what was sent"
        raise UserError(Problem(message, "write one of the two"))
    given, chosen = chosen_of(arguments)
    target = open_target(chosen)
    submission = submission_on(given, chosen, target, arguments)
    _warn_of_credentials(submission, chosen)
    if arguments.dry_run:
        print(target.preview(submission).rstrip("\n"))
        return 0
    target.check(submission)
    _check_not_running(submission.name, target, chosen)
    record = target.submit(submission)
    save_record(record)
    if arguments.json:
        print(json.dumps(_answer(record, submission)))
    else:
        print_submitted(record, submission)
    return 0


def _warn_of_credentials(submission: Submission, chosen: ChosenTarget) -> None:
    """Prints which credentials of stores the nodes will not have from here."""
    from stoker.cluster.unsent_credentials import unsent_credentials
    from stoker.job.targets.shared_keys import TargetKeys

    assert isinstance(chosen.block, TargetKeys)
    for line in unsent_credentials(submission, chosen.block, os.environ):
        print(line, file=sys.stderr)


@dataclass(frozen=True)
class GivenJob:
    """The job of a submission.

    Attributes:
        jobs: the job, or those of its stages.
        staged: the stages; None if the job has none.
    """

    jobs: list[LoadedJob]
    staged: StagedJob | None


def chosen_of(arguments: argparse.Namespace) -> tuple[GivenJob, ChosenTarget]:
    """Returns the job, or its stages, and the target, all checked."""
    from stoker.cluster.chosen_target import choose_target, split_overrides

    overrides, of_target = split_overrides(arguments.on, arguments.overrides)
    staged = stages_if_any(arguments.job, overrides)
    jobs = [open_job(arguments.job, overrides, "send")] if staged is None else open_stages(staged.stages, "send")
    loaded = jobs[0]
    if arguments.on is None and is_of_run(Path(arguments.job)) and _is_written(loaded):
        message = "a target runs commands, so it is not read from a run's own job.yaml"
        raise UserError(loaded.document.problem(("target",), message, "name one with --on"))
    chosen = choose_target(loaded, arguments.on, of_target)
    options = ("include", "exclude")
    given = {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}
    if given and chosen.kind != "ssh":
        raise UserError(Problem(f"--{next(iter(given))} selects ssh hosts, and the target is {chosen.kind}"))
    if given:
        marks: dict[KeyPath, Mark] = {
            (TARGET, chosen.kind, name): Mark(COMMAND_LINE, (0, 0), (0, 0), override=f"--{name} {value}")
            for name, value in given.items()
        }
        document = replace(chosen.document, marks={**chosen.document.marks, **marks})
        chosen = replace(chosen, block=chosen.block.model_copy(update=given), document=document)
    return GivenJob(jobs, staged), chosen


def _is_written(loaded: LoadedJob) -> bool:
    """Returns whether the file sets the target, and not the command line."""
    mark = loaded.document.marks.get(("target",))
    return mark is not None and not mark.override and loaded.job.target != LOCAL


def submission_on(given: GivenJob, chosen: ChosenTarget, target: Target, arguments: argparse.Namespace) -> Submission:
    """Returns the submission, by default for as many nodes as the target has hosts."""
    from stoker.cluster.record import NAME
    from stoker.cluster.staged_submission import staged_submission_of
    from stoker.cluster.submission import submission_of

    name = arguments.name
    if name is not None and not NAME.fullmatch(name):
        raise UserError(Problem(f"--name {name}: not a valid name", "use lower-case letters, digits and hyphens"))
    base, hosts = Path.cwd(), target.host_count()
    if given.staged is not None:
        from stoker.cluster.chosen_target import split_overrides

        overrides, _ = split_overrides(arguments.on, arguments.overrides)
        return staged_submission_of(overrides, given.staged, given.jobs, chosen, base, name=name, hosts=hosts)
    return submission_of(given.jobs[0], chosen, base, name=name, hosts=hosts)


def _check_not_running(name: str, target: Target, chosen: ChosenTarget) -> None:
    """Raises UserError if a run of that name has not ended: one of this user's records, or of the target's own."""
    from stoker.cli.submitted_runs import state_of
    from stoker.cluster.record import find_record

    here = find_record(name)
    there = next((record for record in target.records() if record.name == name), None)
    for record, its_target in ((here, None), (there, target)):
        if record is not None and (status := state_of(record, its_target)).is_active:
            where = record.on or record.kind if its_target is None else chosen.name or chosen.kind
            stop = f"stoker stop {name}" + ("" if its_target is None else f" --on {chosen.name or 'TARGET'}")
            message = f"{name} is already {status.state} on {where}"
            raise UserError(Problem(message, f"wait for it, `{stop}`, or give another --name"))


def print_submitted(record: Record, submission: Submission) -> None:
    """Prints where the job is, and how to follow it."""
    nodes = f"{record.nodes} node{'s' * (record.nodes > 1)} with {record.devices} process{'es' * (record.devices > 1)}"
    nodes += f" and {submission.spares} spare{'s' * (submission.spares > 1)}" if submission.spares else ""
    print(f"submitted {submission.label} to {record.kind}: {nodes}; {record.words}")
    print(f"\nnext:\n  stoker logs {record.name} -f\n  stoker describe {record.name}\n  stoker stop {record.name}")
    sys.stdout.flush()


def _answer(record: Record, submission: Submission) -> dict[str, Any]:
    return {**asdict(record), "files": len(submission.files), "bytes": submission.bytes}
