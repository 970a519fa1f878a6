"""Checks that a job's model and data exist, before any heavy import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stoker.errors import Problem, RunFailed, UserError
from stoker.job import LoadedJob, load_job
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.conflicts.text_conflicts import WITHOUT_ARGUMENTS
from stoker.job.inputs import by_source_key
from stoker.job.load_job import JobError, ReadJob, problem_order
from stoker.job.run_records import is_of_run
from stoker.job.trust import code_problems

# Kinds of `Named` that every verb needs, and those that only training does.
MODELS, OF_TRAINING = ("model",), ("reward_model", "source", "scorer")
Use = Literal["read", "open", "check", "train", "send"]

if TYPE_CHECKING:
    from stoker.job.stage import Stage
    from stoker.job.task_spec import Named
    from stoker.launch.cluster_env import RankInfo
    from stoker.models.model_source import ModelSource


def open_job(path: str, overrides: Sequence[str], use: Use = "read") -> LoadedJob:
    """Loads a job, and checks that its model and sources exist.

    Args:
        use: what follows: its model or data are opened here, it is trained here into its `output`, or it is sent to
            other machines; ``read`` for none of them. ``check`` is as ``train``, but a hub or store that does not
            answer is a note, as the job may be for another machine.

    Raises:
        UserError: the problems of the file and of everything that it names, all at once.
    """
    of_run = is_of_run(Path(path))
    loaded, problems = _looked_for(lambda: load_job(path, overrides), of_run=of_run, use=use)
    if problems or loaded is None:
        raise UserError(*sorted(problems, key=problem_order))
    return loaded


def open_stages(stages: Sequence[Stage], use: Use = "read") -> list[LoadedJob]:
    """Loads the jobs of stages as `open_job` does; a problem of shared keys is reported once."""
    jobs: list[LoadedJob] = []
    problems: dict[tuple[str, int, int, str], Problem] = {}
    for stage in stages:
        of_run, coming = is_of_run(Path(stage.document.file)), [earlier.output for earlier in stages]
        loaded, found = _looked_for(stage.load, of_run=of_run, use=use, coming=coming)
        for problem in stage.placed([problem for problem in found if problem.key not in stage.needs]):  # runs to come
            words = problem.message.removeprefix(f"stage {stage.name}: ")
            problems.setdefault((problem.file, problem.line, problem.column, words), problem)
        if loaded is not None:
            jobs.append(loaded)
    outputs: dict[str, str] = {}
    for stage in stages:
        if stage.name != outputs.setdefault(stage.output, stage.name):
            message = f"stage {stage.name}: {stage.output} is the output of stage {outputs[stage.output]}"
            problem = stage.document.problem(("output",), message, "give each stage its own")
            problems[(problem.file, problem.line, problem.column, message)] = problem
    if problems:
        raise UserError(*sorted(problems.values(), key=problem_order))
    return jobs


def _looked_for(
    load: Callable[[], LoadedJob], *, of_run: bool, use: Use, coming: Collection[str] = ()
) -> tuple[LoadedJob | None, list[Problem]]:
    """Returns a job whose model and sources have been checked, and all problems."""
    loaded: LoadedJob | None = None
    read: ReadJob
    problems: list[Problem] = []
    try:
        read = loaded = load()
        if of_run:
            problems = code_problems(loaded, lambda key: f"{key} on the command line")
    except JobError as error:
        read, problems = error.sound, list(error.problems)
    problems += preflight(read)
    if use in ("check", "train"):
        problems += _name_problems(read, OF_TRAINING, coming) + _output_problems(read)
    elif use == "send":
        problems += _url_problems(read)
    if use in ("open", "check", "train"):
        from stoker.cli.preflight_requests import requested_problems

        try:
            problems += requested_problems(read, problems, coming, weights=use != "open")
        except RunFailed as error:
            if use != "check":
                raise
            print(f"note: {error}; training needs it", file=sys.stderr)
    return loaded, problems


def with_planned_layout(loaded: LoadedJob, rank_info: RankInfo | None = None) -> LoadedJob:
    """Returns the job with the planner's layout, if it has `parallel: auto`.

    Args:
        rank_info: ranks of this process, where a launcher started several.

    Raises:
        CannotRun: nothing fits.
    """
    if not loaded.document.planned:  # no need to detect the devices
        return loaded
    from stoker.launch.auto_parallel import with_plan

    return with_plan(loaded, rank_info)


def _output_problems(loaded: ReadJob) -> list[Problem]:
    from stoker.runs.output_folder import is_run, output_problem

    output = loaded.job.output
    if output is None:
        return []
    folder = Path.cwd() / output
    if (problems := _url_problems(loaded)) and not is_run(folder):  # an earlier version made a folder `s3:`
        return problems
    found = output_problem(folder)
    return [loaded.problem("output", *found)] if found else []


def _url_problems(loaded: ReadJob) -> list[Problem]:
    output = loaded.job.output
    if output is None or "://" not in output:
        return []
    message = f"output: {output} is a URL, and a run has a local folder"
    hint = f"write runs/{Path(output).name} here, and `checkpoint.to: {output}` for the checkpoints"
    return [loaded.problem("output", message, hint)]


def preflight(loaded: ReadJob) -> list[Problem]:
    """Returns the problems of the job's model and sources, each at its key; paths are relative to the current
    folder.
    """
    from stoker.data.sources import source_problem
    from stoker.models.model_source import model_problem, tokenizer_problem
    from stoker.models.tokenizers.special_tokens import stop_tokens

    base = Path.cwd()
    problems: list[Problem] = []
    if loaded.job.model is not None:
        found = model_problem(loaded.job.model, base)
        if found is not None:
            problems.append(loaded.problem("model.name", *found))
        else:
            problems += _shape_problems(loaded, base)
        found = tokenizer_problem(loaded.job.model, base)
        if found is not None:
            problems.append(loaded.problem("model.tokenizer", *found))
    problems += _name_problems(loaded, MODELS) + _checkpoint_problems(loaded, base)
    for key, block in by_source_key(loaded.job.data, loaded.job.evaluate.data).items():
        found = source_problem(block, base)
        if found is not None:
            problems.append(loaded.problem(f"{key}.path", *found))
        if isinstance(block.template, str) and block.template not in ("auto", *WITHOUT_ARGUMENTS):
            problems += _template_problems(loaded, key, block, base)
    if not problems and loaded.job.model is not None and stop_tokens(loaded.job.model):
        from stoker.models.tokenizers.job_tokenizer import stop_problems

        problems = [loaded.placed(problem) for problem in stop_problems(loaded.job.model, loaded.job.data, base)]
    return problems


def _name_problems(loaded: ReadJob, kinds: Collection[str], coming: Collection[str] = ()) -> list[Problem]:
    """Returns the problems of what the task's block names, in addition to the job's model and data.

    Args:
        kinds: kinds of `Named` to look for.
        coming: runs of earlier stages, which need not exist yet.
    """
    from stoker.job.task_spec import task_of

    problems = []
    for named in task_of(loaded.job).names(loaded.job):
        if named.kind in kinds and named.value not in coming:
            problem = _name_problem(named, Path.cwd())
            problems += [loaded.problem(named.key, problem.message, problem.suggestion)] if problem is not None else []
    return problems


def _name_problem(named: Named, base: Path) -> Problem | None:
    """Returns the problem of a model, a run, a source or a reward; None if there is none."""
    from stoker.data.sources import source_problem
    from stoker.job.blocks.model_block import ModelBlock
    from stoker.models.model_source import find_model, model_problem
    from stoker.runs.find_run import find_run

    found: tuple[str, str] | None = None
    match named.kind:
        case "model" | "reward_model" if find_model(named.value, base, or_run=True) is not None:
            found = model_problem(ModelBlock(name=named.value), base)
        case "model" | "reward_model":
            try:
                find_run(named.value, base)
            except UserError as error:
                return Problem(f"{named.value} is neither a model nor a run", error.problems[0].message)
        case "source":
            found = source_problem(SourceBlock(path=named.value), base)
        case "scorer":
            from stoker.train.rollouts.rewards import reward_problem

            return reward_problem(named.value, base)
    return None if found is None else Problem(*found)


def _template_problems(loaded: ReadJob, key: str, block: SourceBlock, base: Path) -> list[Problem]:
    from stoker.data.templates.source_template import template_of

    try:
        template_of(block, base, own="")
    except UserError as error:
        return [p if p.file else loaded.problem(f"{key}.{p.key}", p.message, p.suggestion) for p in error.problems]
    return []


def _shape_problems(loaded: ReadJob, base: Path) -> list[Problem]:
    from stoker.models.context_length import context_problem, stated_context
    from stoker.models.model_folder import read_config
    from stoker.models.model_source import find_model, quantised_problem
    from stoker.models.router_check import router_problem

    assert loaded.job.model is not None
    context = stated_context(loaded.job.model, base)
    problem = context_problem(loaded, context) if context is not None else None
    source, quantised = find_model(loaded.job.model.name, base), None
    if source is not None and source.kind == "folder":
        quantised = quantised_problem(loaded.job.model, read_config(Path(source.where)))
    problems = (problem, router_problem(loaded, base), quantised and loaded.placed(quantised))
    return [*_config_problems(loaded, source), *(found for found in problems if found is not None)]


def _config_problems(loaded: ReadJob, source: ModelSource | None) -> list[Problem]:
    """Returns the problems of `model.config`, if the model's configuration is on this machine."""
    block = loaded.job.model
    if block is None or not block.config or source is None or source.kind not in ("folder", "gguf"):
        return []
    from stoker.models.hf_config import whole_config
    from stoker.models.model_files import settings_of

    try:
        whole_config(settings_of(source, own_code=block.trust_remote_code), block)
    except UserError as error:
        return [loaded.placed(replace(p, key=p.key or "model.config")) for p in error.problems]
    return []


def _checkpoint_problems(loaded: ReadJob, base: Path) -> list[Problem]:
    from stoker.files import unwritable
    from stoker.node_cache.urls import place_problem

    to = loaded.job.checkpoint.to
    if to is None:
        return []
    if "://" in to:
        if (found := place_problem(to)) is None:
            return []
        message = f"checkpoint.to: {to} cannot hold checkpoints: {found[0]}"
        return [loaded.problem("checkpoint.to", message, found[1])]
    if what := unwritable(base / to):
        return [loaded.problem("checkpoint.to", f"checkpoint.to: {to} {what}", "give another folder or URL")]
    return []
