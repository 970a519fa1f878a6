"""Finds a submitted run by name: in this user's records, or in those that a target stores."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from stoker.cluster.chosen_target import AROUND, ChosenTarget, named_target
from stoker.cluster.record import Record, record_among, record_named
from stoker.cluster.target import Target, open_target
from stoker.errors import Problem, UserError
from stoker.job.document.yaml_document import JobDocument
from stoker.job.keys.key_paths import TARGET
from stoker.job.targets import KINDS


@dataclass(frozen=True)
class SubmittedRun:
    """A run and the target that has it."""

    record: Record
    target: Target


def submitted_run(run: str, on: str | None = None) -> SubmittedRun:
    """Returns a submitted run.

    Args:
        run: its name, or the run's folder.
        on: a target, whose own records are read instead of this user's, for runs submitted from another machine.

    Raises:
        UserError: there is no such run.
    """
    if on is None:
        record = record_named(run)
        return SubmittedRun(record, target_of(record))
    target = open_target(named_target(on))
    records = target.records()
    found = record_among(records, run)
    if found is None:
        known = f"it has {', '.join(sorted(record.name for record in records))}" if records else "it has none"
        raise UserError(Problem(f"the target {on} has no run {run}", known))
    return SubmittedRun(found, target)


def target_of(record: Record) -> Target:
    """Returns the target of a record, with the settings at the time of submission.

    Raises:
        UserError: this version does not know such a target.
    """
    try:
        block = KINDS[record.kind].model_validate(record.target)
    except (KeyError, ValidationError) as error:
        message = f"the record of the run {record.name} has a target `{record.kind}` that this version does not know"
        raise UserError(Problem(message, "use the version of Stoker that submitted it")) from error
    data = {**AROUND, TARGET: {record.kind: record.target}}
    return open_target(ChosenTarget(record.kind, block, record.on, JobDocument(f"{record.name}.json", data, {})))
