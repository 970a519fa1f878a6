"""The planner's prediction for a run that is about to start, and its measurement: for the run's folder."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stoker.checkpoint.object_collectives import rank, run_on_all_ranks
from stoker.checkpoint.save_plan import SPARE
from stoker.errors import UserError
from stoker.hardware.machines.detect_machine import machines
from stoker.hardware.measured.planner_correction import COPIES
from stoker.hardware.process_device import Device
from stoker.hardware.processor import processor_name
from stoker.job.keys.tune_keys import virtual_tokens
from stoker.job.layout import layout_of
from stoker.job.resolved import ResolvedJob
from stoker.job.rollout_sizes import RolloutSizes
from stoker.job.task_spec import task_of, unit_size_of
from stoker.models.head import OWN_CRITIC
from stoker.plan.block_dtypes import FLOAT
from stoker.plan.memory.memory_formulas import allocatable_bytes, peak_memory
from stoker.plan.planned_job import critic_work, setting_of_job, work_of_shape
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.time.step_time import ROLLOUTS, step_time
from stoker.runs.plan_record import Predicted, PredictionRecord, measured_of
from stoker.runs.run_folder import RunFolder
from stoker.train.prepared import Prepared
from stoker.train.run_schedule import memory_interval

MICRO_BATCHES, TOKENS = 32, 1 << 20  # the sample ends at whichever is reached first


def predicted_of(prepared: Prepared) -> PredictionRecord:
    """Predicts a prepared run. A collective; the result is on rank 0.

    An error is recorded as the reason for having no prediction; training starts regardless.
    """
    hosts = run_on_all_ranks(platform.node)
    if rank() != 0:
        return PredictionRecord(None)
    if (task := task_of(prepared.job)).ranks:
        return PredictionRecord(
            None, f"steps of task {task.name} are not timed beforehand; `stoker plan` has its memory"
        )
    if not task.text:
        return PredictionRecord(None, "the planner does not know the shapes of your own module")
    try:
        return PredictionRecord(predicted_for(prepared, len(hosts), hosts.count(hosts[0])))
    except UserError as error:
        return PredictionRecord(None, str(error.problems[0]))
    except Exception as error:  # a bug of the planner must not cost a run
        return PredictionRecord(None, f"{type(error).__name__}: {error}")


def predicted_for(prepared: Prepared, processes: int, per_machine: int) -> Predicted:
    """Predicts a prepared language task on this number of processes."""
    job, language = prepared.job, prepared.task.language
    assert job.model is not None and language is not None
    cluster = machines(processes, per_machine)
    config: Mapping[str, Any] = language.model.config.to_dict()
    shape = shape_of_config(config, name=job.model.name)
    rollouts = task_of(job).work.rollouts(job)
    prompt, rows = _of_answers(prepared, rollouts) if rollouts else (None, _fullest_and_usual(prepared))
    precision = "fp8" if job.train.float8 != "none" else prepared.device.precision
    settings = []
    for row in rows:
        one = job.model_copy(update={"train": job.train.model_copy(update={"seq_len": row.tokens})})
        work = work_of_shape(one, shape, precision=precision)
        work = replace(work, computed=row.computed, predicted=row.predicted, prompt=prompt)
        work = replace(work, critic=_critic_of(prepared, work))
        settings.append(setting_of_job(one, cluster, work))
    fullest, usual = settings
    _, memory = peak_memory(fullest)
    time = dict(step_time(usual).parts)
    sampling = time.pop(ROLLOUTS, 0.0)
    uncorrected = replace(cluster, corrections=())
    bare_fullest, bare_usual = (setting_of_job(job, uncorrected, setting.work) for setting in (fullest, usual))
    cpu = cluster.device.is_cpu
    correction = cluster.correction(fullest.work.precision, fullest.work.tuning)
    copies = {COPIES: _copies(fullest, job, room=allocatable_bytes(cluster) - memory.peak)} if cpu else {}
    return Predicted(
        layout=layout_of(job).describe(),
        micro_batch=fullest.micro_batch,
        accumulation=fullest.micro_batches,
        longest=round(rows[0].computed),
        mean=rows[1].computed,
        model=job.model.name,
        precision=fullest.work.precision,
        tuning=fullest.work.tuning,
        device=processor_name() if cpu else cluster.device.name,
        threads=max(1, cluster.host_cores // per_machine) if cpu else 0,
        machines=cluster.nodes,
        per_machine=per_machine,
        calibration=cluster.calibration.date if cluster.calibration else None,
        corrected_by=correction.run if correction else None,
        memory=dict(peak_memory(bare_fullest)[1].parts) | copies,
        time={name: part for name, part in step_time(bare_usual).parts.items() if name != ROLLOUTS},
        peak=memory.peak + sum(copies.values()),
        upper=memory.upper + sum(copies.values()),
        seconds=sum(time.values()),
        rollouts=sampling,
    )


def _critic_of(prepared: Prepared, work: TrainingWork) -> TrainingWork | None:
    """Returns the work of a critic that is a separate model."""
    language = prepared.task.language
    if language is None or language.critic is None:
        return None
    from stoker.models.tuning.adapters import unwrap

    critic: Any = prepared.task.model.get_submodule(OWN_CRITIC)
    shape = shape_of_config(unwrap(critic).config.to_dict(), name="critic")
    trains_all = all(p.requires_grad for p in critic.parameters())
    return critic_work(work, shape, prepared.job.tune.model_copy(update={"method": "full" if trains_all else "lora"}))


def _copies(setting: Setting, job: ResolvedJob, *, room: float) -> float:
    """Bytes of this process' copies of the training state on a CPU, which shares its memory with training: two, or as
    many as there is ``room`` for beside training.
    """
    if not job.checkpoint.background and memory_interval(job) == 0:
        return 0.0
    states = setting.software.states + setting.software.outer
    each = setting.work.trained * (FLOAT + states) / setting.layout.world
    return each * min(2, SPARE * max(0.0, room) // each)


@dataclass(frozen=True)
class _Row:
    """A micro-batch row: its tokens, and what is computed on it, in `stoker.plan.setting.TrainingWork`'s terms."""

    tokens: int
    computed: float
    predicted: float


def _fullest_and_usual(prepared: Prepared) -> tuple[_Row, _Row]:
    """Returns the row of the fullest forward pass and that of a mean micro-batch, from the first micro-batches.

    The fullest pass is capped by the longest row and extrapolated to three standard deviations above the mean.
    """
    train, audit, corpus, language = prepared.job.train, prepared.audit, prepared.corpus, prepared.task.language
    assert audit is not None and corpus is not None and language is not None
    size = train.micro_batch
    totals: list[np.ndarray] = []
    passes: list[np.ndarray] = []
    seen = 0
    while len(totals) < MICRO_BATCHES and seen < TOKENS:
        first = len(totals) * size
        rows = [(d.row.ids, d.row.trained) for i in range(first, first + size) for d in corpus.sequences[i]]
        laid_out = language.lay_out(rows, torch.device("cpu"))
        sizes = [(inputs.ids.numel(), len(inputs.targets)) for inputs in laid_out]
        totals.append(np.sum(sizes, axis=0) / size)
        passes.append(np.max(sizes, axis=0) / size)
        seen += sum(inputs.tokens for inputs in laid_out)
    full = np.maximum(np.max(passes, axis=0), np.mean(passes, axis=0) + 3 * np.std(passes, axis=0))
    longest = train.seq_len if train.pack else min(train.seq_len, audit.longest)
    computed, predicted = np.minimum(
        full, unit_size_of(prepared.job) * (longest + virtual_tokens(prepared.job))
    ).tolist()
    usual = np.mean(totals, axis=0).tolist()
    mean = train.seq_len if train.pack else min(train.seq_len, audit.mean)
    return _Row(longest, computed, predicted), _Row(max(1, round(mean)), *usual)


def _of_answers(prepared: Prepared, sizes: RolloutSizes) -> tuple[float, tuple[_Row, _Row]]:
    """Returns the mean length of the first prompts, and the rows of the longest and of a mean one with an answer.

    Answers to a prompt that are in one forward pass share the prompt.
    """
    corpus, language, train = prepared.corpus, prepared.task.language, prepared.job.train
    assert corpus is not None and language is not None
    asked = min(corpus.sequences.total(1), MICRO_BATCHES * train.micro_batch)
    lengths = [len(corpus.sequences[i][0].row.prompt) for i in range(asked)]
    share = min(train.micro_batch, sizes.answers) if language.packs else 1
    longest, mean = (
        _Row(round(prompt) + sizes.tokens, prompt / share + sizes.tokens, sizes.tokens)
        for prompt in (max(lengths), float(np.mean(lengths)))
    )
    return float(np.mean(lengths)), (longest, mean)


def add_measurement(before: PredictionRecord, folder: RunFolder, device: Device, *, resumed: int) -> PredictionRecord:
    """Adds what was measured since the run started or resumed to its prediction; a collective.

    Args:
        resumed: the step that the run resumed after.
    """
    peaks = run_on_all_ranks(device.peak_memory)
    if rank() != 0:
        return before
    lines = [line for line in folder.read_metrics() if line["step"] > resumed]
    return PredictionRecord(before.predicted, before.why_not, measured_of(lines, memory=max(peaks) * 2**30))
