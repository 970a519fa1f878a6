"""The submission of a job with stages: the whole chain goes to one node, which trains one stage after another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.named_files import NamedFiles, named_files
from stoker.cluster.sent_files import SentFile, fingerprint_of, needed_files
from stoker.cluster.submission import JOB, Submission, name_of, port_of, with_layout
from stoker.errors import CannotRun, UserError
from stoker.job.job_to_yaml import scalar
from stoker.job.key_paths import TARGET, parse_key
from stoker.job.layout import layout_of
from stoker.job.load_job import STAGES, LoadedJob
from stoker.job.stage import FROM, Stage
from stoker.job.stages import StagedJob, with_overrides
from stoker.job.targets.shared_keys import TargetKeys
from stoker.plan.planned_job import parallel_block


def staged_submission_of(
    file: str,
    overrides: Sequence[str],
    staged: StagedJob,
    jobs: Sequence[LoadedJob],
    chosen: ChosenTarget,
    base: Path,
    *,
    name: str | None = None,
) -> Submission:
    """Returns the submission of a chain of stages to a target.

    Args:
        file, overrides: from the command line.
        jobs: of the stages, in order.
        base: the folder in which the command was given.
        name: of the run; by default of the folder of the stages' runs.

    Raises:
        UserError: the stages cannot run on one node, or files that they need cannot be read.
        CannotRun: the planner finds no layout for the node.
    """
    keys = chosen.block
    assert isinstance(keys, TargetKeys)
    if keys.nodes not in ("auto", 1):
        message = f"`nodes` is {keys.nodes}, and the stages of a job run on one node"
        raise UserError(chosen.problem("nodes", message, "write `nodes: 1`, or submit the stages one by one"))
    written = list(overrides)
    planned = []
    for stage, loaded in zip(staged.stages, jobs, strict=True):
        planned.append(with_layout(loaded, chosen, keys, 1))
        if loaded.document.planned:
            block = parallel_block(layout_of(planned[-1].job))
            written.append(f"stages.{stage.name}.parallel={json.dumps(block)}")
    devices = _devices(staged, planned, chosen, keys)
    named = NamedFiles(base)
    for stage, loaded in zip(staged.stages, planned, strict=True):
        own = named_files(loaded, base, without={"model.name" if key == FROM else key for key in stage.needs})
        named = NamedFiles(base, named.found | own.found, named.made | own.made)
        if not keys.in_place:
            written += [text for text in _moved(stage, own.moved) if text not in written]
    sent = needed_files(named, base, chosen)
    text = _text(with_overrides(file, written))
    files = (SentFile.made(JOB, text), *sent)
    chosen_name = name or name_of(staged.root)
    return Submission(
        name=chosen_name,
        loaded=planned[0],
        job=text,
        nodes=1,
        devices=devices,
        files=files,
        fingerprint=fingerprint_of(files),
        output=staged.root,
        port=keys.port if keys.port != "auto" else port_of(chosen_name),
        base=base,
        stages=tuple(stage.name for stage in staged.stages),
    )


def _devices(staged: StagedJob, jobs: Sequence[LoadedJob], chosen: ChosenTarget, keys: TargetKeys) -> int:
    """Processes of the node: those of the stage that has most."""
    worlds = {stage.name: layout_of(loaded.job).world for stage, loaded in zip(staged.stages, jobs, strict=True)}
    largest = max(worlds, key=lambda name: worlds[name])
    if keys.devices == "auto":
        return worlds[largest]
    if worlds[largest] > keys.devices:
        message = f"stage {largest} has {worlds[largest]} processes, and `devices` is {keys.devices}"
        raise CannotRun(chosen.problem("devices", message, f"write `devices: {worlds[largest]}`"))
    return keys.devices


def _moved(stage: Stage, moved: dict[str, Any]) -> list[str]:
    """Returns overrides for keys with other values on the node: of the stage, or of the shared keys."""
    texts = []
    for key, value in moved.items():
        path = parse_key(key)
        own = any(path[:end] in stage.own for end in range(1, len(path) + 1))
        texts.append(f"{f'stages.{stage.name}.' if own else ''}{key}={json.dumps(value)}")
    return texts


def _text(data: dict[str, Any]) -> str:
    """A job file of the data, without its target, which the node need not know."""
    lines = [f"{key}: {scalar(value)}" for key, value in data.items() if key not in (STAGES, TARGET)]
    lines.append(f"{STAGES}:")
    for stage in data[STAGES]:
        name, *rest = ((key, value) for key, value in stage.items() if key != TARGET)
        lines.append(f"  - {name[0]}: {scalar(name[1])}")
        lines += [f"    {key}: {scalar(value)}" for key, value in rest]
    return "\n".join(lines) + "\n"
