"""The submission of a job with stages: the whole chain goes to the nodes, which train one stage after another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.named_files import NamedFiles, named_files
from stoker.cluster.private_files import PrivateFile, checked_private
from stoker.cluster.record import name_of
from stoker.cluster.sent_files import SentFile, needed_files
from stoker.cluster.submission import (
    JOB,
    Submission,
    moved_on,
    nodes_and_processes,
    port_of,
    spares_of,
    with_layout,
)
from stoker.errors import UserError
from stoker.job.document.job_to_yaml import scalar
from stoker.job.keys.key_paths import TARGET, parse_key
from stoker.job.layout import layout_of
from stoker.job.load_job import STAGES, LoadedJob
from stoker.job.stage import FROM, Stage
from stoker.job.stages import StagedJob, with_overrides
from stoker.job.targets.shared_keys import TargetKeys


def staged_submission_of(
    overrides: Sequence[str],
    staged: StagedJob,
    jobs: Sequence[LoadedJob],
    chosen: ChosenTarget,
    base: Path,
    *,
    name: str | None = None,
    hosts: int | None = None,
) -> Submission:
    """Returns the submission of a chain of stages to a target.

    Args:
        overrides: those of the command line.
        jobs: of the stages, in order.
        base: the folder in which the command was given.
        name: of the run; by default of the folder of the stages' runs.
        hosts: the target's number of hosts, if it is known.

    Raises:
        UserError: nodes and processes do not match the largest stage's layout, or files that the stages need cannot be
            read.
        CannotRun: the planner finds no layout for the nodes.
    """
    keys = chosen.block
    assert isinstance(keys, TargetKeys)
    if spares_of(keys):
        message = "the stages of a job have no spare nodes"
        raise UserError(chosen.problem("spares", message, "remove `spares`; a stage waits for a lost node"))
    written = list(overrides)
    planned = []
    for stage, loaded in zip(staged.stages, jobs, strict=True):
        planned.append(with_layout(loaded, chosen, keys, hosts))
        if loaded.document.planned:
            block = planned[-1].document.data["parallel"]
            written.append(f"stages.{stage.name}.parallel={json.dumps(block)}")
    largest = max(planned, key=lambda loaded: layout_of(loaded.job).world)
    nodes, devices = nodes_and_processes(largest, chosen, keys, hosts)
    check_all_nodes_stay(planned)
    named = NamedFiles(base)
    private: dict[str, PrivateFile] = {}
    for stage, loaded in zip(staged.stages, planned, strict=True):
        own = named_files(loaded, base, without={"model.name" if key == FROM else key for key in stage.needs})
        named = NamedFiles(base, named.found | own.found, named.made | own.made, private=named.private | own.private)
        sent_privately = checked_private(loaded, own.private.values(), chosen)
        private |= {file.path: file for file in sent_privately}
        if not keys.in_place:
            moved = moved_on(own, sent_privately)
            written += [text for text in _moved(stage, moved) if text not in written]
    sent = needed_files(named, base, chosen)
    text = _text(with_overrides(staged.document, written))
    chosen_name = name or name_of(staged.root)
    return Submission(
        name=chosen_name,
        loaded=planned[0],
        job=text,
        nodes=nodes,
        devices=devices,
        files=(SentFile.made(JOB, text), *sent),
        output=staged.root,
        port=keys.port if keys.port != "auto" else port_of(chosen_name),
        base=base,
        stages=tuple(stage.name for stage in staged.stages),
        private=tuple(private.values()),
        stage_jobs=tuple(planned),
    )


def check_all_nodes_stay(jobs: Sequence[LoadedJob]) -> None:
    """Raises UserError if `faults.nodes` lets a stage continue with fewer than all nodes."""
    for loaded in jobs:
        stated = loaded.job.faults.nodes
        if stated is not None and stated.min < stated.max:
            message = f"the stages of a job need all of their nodes, and `faults.nodes.min` is {stated.min}"
            hint = "remove `faults.nodes`; a stage waits for a lost node"
            raise UserError(loaded.document.problem(("faults", "nodes", "min"), message, hint))


def _moved(stage: Stage, moved: dict[str, Any]) -> list[str]:
    """Returns overrides for keys with other values on the node: of the stage, or of the shared keys."""
    texts = []
    for key, value in moved.items():
        path = parse_key(key)
        own = any(path[:end] in stage.own for end in range(1, len(path) + 1))
        texts.append(f"{f'stages.{stage.name}.' if own else ''}{key}={json.dumps(value)}")
    return texts


def _text(data: dict[str, Any]) -> str:
    """Returns the data as a job file, without the target, which the nodes do not need."""
    lines = [f"{key}: {scalar(value)}" for key, value in data.items() if key not in (STAGES, TARGET)]
    lines.append(f"{STAGES}:")
    for stage in data[STAGES]:
        name, *rest = ((key, value) for key, value in stage.items() if key != TARGET)
        lines.append(f"  - {name[0]}: {scalar(name[1])}")
        lines += [f"    {key}: {scalar(value)}" for key, value in rest]
    return "\n".join(lines) + "\n"
