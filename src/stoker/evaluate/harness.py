"""Tasks of lm-evaluation-harness: its own by name, YAML files, and the offline pack."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError, did_you_mean, reason_of
from stoker.evaluate.ask_model import AskSettings
from stoker.evaluate.intervals import Mean, mean_interval
from stoker.evaluate.offline_tasks import PREFIX, names, offline_task
from stoker.generate.open_model import OpenModel
from stoker.runs.evaluations import Figure
from stoker.scoring.scorer import INSTALL

YAML = (".yaml", ".yml")
PER_BYTE = ("bits_per_byte", "byte_perplexity", "word_perplexity")


@dataclass(frozen=True)
class TaskResults:
    """Results of tasks.

    Attributes:
        rows: each question with its answers and metrics, as the harness logs them.
        versions: version of each task.
    """

    figures: tuple[Figure, ...]
    rows: list[dict[str, Any]]
    versions: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Digest of the questions."""
        digest = hashlib.blake2b(digest_size=32)
        for row in self.rows:
            digest.update(f"{row['task']}\0{row['question_digest']}\n".encode())
        return digest.hexdigest()


def task_specs(asked: Sequence[str], base: Path) -> tuple[list[Any], list[str]]:
    """Returns the harness' specs for names on the command line, and notes on names left out.

    ``offline`` is the whole pack; a path that ends in .yaml is a task of the user's, whose code is run.

    Raises:
        UserError: lm-eval is not installed, or a task does not exist.
    """
    if find_spec("lm_eval") is None:
        raise UserError(Problem("--tasks needs lm-evaluation-harness, which is not installed", INSTALL))
    specs: list[Any] = []
    notes = []
    for name in asked:
        if name == PREFIX:
            for each in names():
                try:
                    specs.append(offline_task(each))
                except UserError as error:
                    notes.append(f"{each} is left out: {error}")
        elif name.startswith(f"{PREFIX}/"):
            specs.append(offline_task(name))
        elif name.endswith(YAML):
            path = base / name
            if not path.is_file():
                raise UserError(f"there is no file {name}")
            specs.append(str(path))
        else:
            specs.append(name)
    if not specs:
        raise UserError(*notes)
    return specs, notes


def run_tasks(
    model: OpenModel,
    specs: Sequence[Any],
    settings: AskSettings,
    *,
    manager: Any,
    limit: int | None = None,
    chat: bool = False,
) -> TaskResults:
    """Runs tasks with the engine.

    Args:
        manager: the task manager; see `load_tasks`.
        limit: most questions of each task.
        chat: whether prompts are conversations through the model's chat template.
    """
    from lm_eval import evaluator

    from stoker.evaluate.harness_model import HarnessModel

    # It runs git in the current folder, which may be no repository, for a field that nothing here reads.
    evaluator.get_git_commit_hash = str
    found = evaluator.simple_evaluate(
        HarnessModel(model, settings),
        tasks=list(specs),
        task_manager=manager,
        limit=limit,
        apply_chat_template=chat,
        random_seed=settings.seed,
        numpy_random_seed=settings.seed,
        torch_random_seed=settings.seed,
        fewshot_random_seed=settings.seed,
        bootstrap_iters=1000,
    )
    rows = [_row(task, sample) for task, samples in found["samples"].items() for sample in samples]
    figures = [
        figure
        for task, results in found["results"].items()
        for figure in _figures(task, results, found["samples"].get(task, ()))
    ]
    return TaskResults(tuple(figures), rows, dict(found["versions"]))


def load_tasks(specs: Sequence[Any]) -> Any:
    """Returns a task manager for these tasks, after loading each once.

    Raises:
        UserError: a task is unknown, needs data that are not available, or runs code that a model writes.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=not all(isinstance(spec, dict) for spec in specs))
    for spec in specs:
        name = spec["task"] if isinstance(spec, dict) else str(spec)
        if isinstance(spec, str) and not spec.endswith(YAML) and not manager.match_tasks([spec]):
            near = did_you_mean(spec, [*manager.all_tasks, *names()], 0.6)
            hint = near or f"`{PREFIX}` needs no network, a .yaml file is your own"
            raise UserError(Problem(f"lm-evaluation-harness has no task {spec!r}", hint))
        advice = f"its data comes from a hub; `--tasks {PREFIX}` needs none" if isinstance(spec, str) else ""
        try:
            loaded = manager.load([spec])
        except Exception as error:  # a task is a program, and its data come through libraries
            raise UserError(Problem(f"the task {name} cannot be loaded: {reason_of(error)}", advice)) from error
        unsafe = [task for task, each in loaded["tasks"].items() if each.config.unsafe_code]
        if unsafe:
            hint = f"write {PREFIX}/humaneval, which runs them in a sandbox"
            raise UserError(Problem(f"the task {unsafe[0]} runs programs that the model writes", hint))
    return manager


def _figures(task: str, results: dict[str, Any], samples: Sequence[dict[str, Any]]) -> list[Figure]:
    found = []
    for key, value in results.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        kept = [sample for sample in samples if sample["filter"] == filtered]  # a question has a sample for each filter
        error = results.get(f"{metric}_stderr,{filtered}")
        spread = float(error) if isinstance(error, int | float) else _ratio_error(metric, kept)
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        count = len(kept) if samples else int(results.get("sample_len", 0) or 0)
        interval = mean_interval(Mean(float(value), spread, count))
        found.append(Figure(task, name, float(value), spread, count, *interval))
    return found


def _ratio_error(metric: str, samples: Sequence[dict[str, Any]]) -> float | None:
    """Returns the standard error of a log-likelihood per byte or word: that of a ratio of sums (delta method)."""
    if metric not in PER_BYTE or len(samples) < 2:
        return None
    pairs = [(-float(total), float(units)) for total, units in (sample[metric] for sample in samples)]
    count, units = len(pairs), sum(pair[1] for pair in pairs)
    rate = sum(pair[0] for pair in pairs) / units
    residual = sum((total - rate * size) ** 2 for total, size in pairs)
    error = math.sqrt(count / (count - 1) * residual) / units
    return error / math.log(2) if metric == "bits_per_byte" else math.exp(rate) * error


def _row(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a question in its stored form."""
    kept = {
        "task": task,
        "number": sample["doc_id"],
        "question_digest": sample["doc_hash"],
        "target": sample["target"],
        "asked": sample["arguments"],
        "answers": sample["filtered_resps"],
        "filter": sample["filter"],
        "metrics": {name: sample[name] for name in sample["metrics"]},
    }
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain
