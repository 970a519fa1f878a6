"""Facts about a run that are printed before it starts and recorded with its environment."""

from __future__ import annotations

import torch

from stoker.data.audit import Audit
from stoker.data.mixture_report import in_words
from stoker.job.task_spec import task_of
from stoker.train.optim.lr_schedule import Schedule
from stoker.train.prepared import Prepared
from stoker.train.run_schedule import RunLength


def run_facts(prepared: Prepared, length: RunLength, schedule: Schedule) -> dict[str, str]:
    """Returns the device, the numbers of a run and what a user should know of its data, by name."""
    device, checked, train = prepared.device, prepared.audit, prepared.job.train
    samples = "sequences" if prepared.task.unit == "token" else f"{prepared.task.unit}s"
    evaluates = (
        f"held-out evaluation every {_steps(length.evaluate_every)}" if prepared.task.evaluates else "no evaluation"
    )
    facts = {
        "device": f"{device.type} ({device.name}), {torch.get_num_threads()} threads, {device.precision}: {device.why}",
        "steps": f"{length.steps} of {train.batch} {samples} ({train.micro_batch} at a time), "
        f"{length.samples} in all; "
        f"lr {schedule.peak:g}, {schedule.shape}, {schedule.warmup} of warm-up",
        "saves": f"every {_steps(length.save_every)}; {evaluates}",
    }
    return facts | (_data_facts(checked, prompts=task_of(prepared.job).rows.prompts) if checked else {})


def _data_facts(checked: Audit, *, prompts: bool) -> dict[str, str]:
    """Returns what a user should know of the data before it is trained on."""
    facts = {}
    if len(checked.mixture) > 1:
        facts["sources"] = in_words(checked.mixture)
    if ignored := [f"{i.field} ({i.rows:,} rows)" for i in checked.fields_ignored]:
        facts["ignored"] = f"fields that never reach the text: {', '.join(ignored[:8])}"
    if both := checked.contradictions:
        facts["labels"] = f"{both:,} answer{'s' * (both != 1)} labelled both good and bad, and trained on as both"
    if unlike := checked.prompt_not_prefix:
        where = f"in {unlike:,} row{'s' * (unlike != 1)}"
        facts["prompts"] = f"as served, not an exact prefix of the trained text {where}: see `stoker data`"
    if missing := checked.stop_missing:
        facts["answers"] = f"no stop token after the last answer of {missing:,} row{'s' * (missing != 1)}"
    trained = "" if prompts else f", {checked.trained_tokens / checked.tokens:.0%} trained"
    facts["data"] = (
        f"{checked.rows_used} of {checked.rows_in} rows, {checked.tokens:,} tokens{trained}; "
        f"{checked.held_out} sequence{'s' * (checked.held_out != 1)} held out"
    )
    return facts


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"
