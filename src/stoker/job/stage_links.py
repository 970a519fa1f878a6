"""The keys of a stage that name earlier stages, and the values that they resolve to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.job.keys.key_paths import parse_key
from stoker.job.keys.suggest_key import nearest
from stoker.job.keys.tune_keys import VIRTUAL, can_merge
from stoker.job.paths import absolute, exists
from stoker.job.stage import FROM, MODELS, STAGE_KEYS, Stage, with_value
from stoker.job.task_spec import TASKS
from stoker.job.trust import TRUST

CRITIC = "ppo.critic"


def resolve_stage_links(stage: Stage, earlier: Sequence[Stage], names: Sequence[str]) -> tuple[Stage, list[Problem]]:
    """Returns the stage with the folders of the earlier stages that its keys name, and problems with the names."""
    known, document = {other.name: other for other in earlier}, stage.document
    problems: list[Problem] = []
    for key, task in STAGE_KEYS.items():
        path = parse_key(key)
        try:
            name = document.at(path)
        except KeyError:
            continue
        if key != FROM and not isinstance(name, str):
            continue  # the schema reports the problem
        if name not in known:
            if key != FROM and name not in names and (not task or _is_run(name) or not nearest(name, names)):
                continue  # a model or a run that belongs to no stage
            later = "this is not an earlier stage" if name in names else "there is no such stage"
            hint = suggest_stage(str(name), list(known)) if name not in names else "move that stage before this one"
            if name == stage.name:
                later, hint = "a stage cannot use itself", suggest_stage(str(name), list(known))
            problems.append(document.problem(path, f"stage {stage.name}: `{key}: {name}`: {later}", hint))
            continue
        if problem := _unfit(key, known[name], task):
            problems.append(document.problem(path, f"stage {stage.name}: `{key}: {name}`: {problem[0]}", problem[1]))
        stage = _linked_to(stage, key, known[name])
    return stage, problems


def _is_run(name: str) -> bool:
    return any(exists(absolute(place, Path.cwd())) for place in (name, f"runs/{name}"))


def _unfit(key: str, stage: Stage, task: str) -> tuple[str, str] | None:
    """Returns why a key cannot name this stage, with a suggestion; None if it can, or if its job is invalid."""
    found = stage.document.data.get("task")
    if found not in TASKS:
        return None
    if task and found != task:
        return f"that stage is of task {found}", f"name a stage of task {task}"
    if not task and (not TASKS[found].text or TASKS[found].model.head == "score"):
        return f"task {found} trains no language model", "name a stage that trains one"
    return _unmergeable(stage, key) if key in (FROM, CRITIC) else None


def _unmergeable(stage: Stage, key: str) -> tuple[str, str] | None:
    try:
        job = stage.load().job
    except UserError:
        return None  # reported for that stage
    if can_merge(job):
        return None
    what = "virtual tokens" if job.tune.method in VIRTUAL else "an adapter of a quantised base"
    why = f"it trains {what}, which cannot be added to the weights"
    if key == CRITIC:
        why = f"it trains {what}, which cannot be a critic of its own"
    if job.tune.method == "lora":
        return why, "remove `model.quantise` in that stage"
    return why, "write `tune: lora` or `tune: full` in that stage"


def _linked_to(stage: Stage, key: str, earlier: Stage) -> Stage:
    """Returns the stage with the output of an earlier one at the key that names it."""
    path, document = parse_key(key), stage.document
    needs = {**stage.needs, key: earlier.name}
    begin = earlier.document.data.get("model")
    begin = begin if isinstance(begin, dict) else {}
    if key != FROM:
        now = begin.get("name", earlier.output) if key in MODELS else earlier.output
        trained = {**stage.trained, path: earlier.output}
        return replace(stage, document=with_value(document, path, now), trained=trained, needs=needs)
    own = {name: value for name, value in document.data["model"].items() if name != "from"}
    trust = {name: begin[name] for name in TRUST if name in begin}
    marks = dict(document.marks)
    for at, mark in earlier.document.marks.items():
        if at[0] == "model" and len(at) > 1 and at[1] not in (*own, "from"):
            marks[at] = mark
    kept = {name: value for name, value in begin.items() if name != "quantise"}
    data = {**document.data, "model": {**kept, **own}}
    model = {"name": earlier.output, **trust, **own}
    trained = {**stage.trained, ("model",): model}
    document = replace(document, data=data, marks=marks, continues=True)
    return replace(stage, document=document, trained=trained, needs=needs)


def suggest_stage(name: str, names: Sequence[str]) -> str:
    """Suggests a stage's name: the nearest, or all."""
    found = nearest(name, names)
    return f"write {found}" if found else f"take one of {', '.join(names)}" if names else "it is the first stage"
