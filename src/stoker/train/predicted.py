"""What the planner says of a run that is about to begin, and what is measured of it: for the run's folder."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from stoker.checkpoint.together import rank, together
from stoker.errors import UserError
from stoker.hardware.detect import machines
from stoker.hardware.device import Device
from stoker.hardware.process import processor_name
from stoker.job.layout import layout_of
from stoker.models.adapters import unwrap
from stoker.plan.memory import peak_memory
from stoker.plan.of_job import setting_of_job, work_of_shape
from stoker.plan.shapes.config import shape_of_config
from stoker.plan.step_time import step_time
from stoker.runs.comparison import Comparison, Predicted, measured_of
from stoker.runs.folder import RunFolder
from stoker.train.prepare import Prepared


def predicted_of(prepared: Prepared) -> Comparison:
    """The prediction of a prepared run; a collective, on rank 0 with the result.

    Whatever goes wrong in it is told, and does not keep the run from training.
    """
    hosts = together(platform.node)
    if rank() != 0:
        return Comparison(None)
    if prepared.job.task == "module":
        return Comparison(None, "the shape of a module of one's own is not known")
    try:
        return Comparison(_predicted(prepared, len(hosts), hosts.count(hosts[0])))
    except UserError as error:
        return Comparison(None, str(error.problems[0]))
    except Exception as error:  # a bug of the planner must not cost a run
        return Comparison(None, f"{type(error).__name__}: {error}")


def _predicted(prepared: Prepared, processes: int, per_machine: int) -> Predicted:
    job = prepared.job
    assert job.model is not None
    cluster = machines(processes, per_machine)
    config: Mapping[str, Any] = unwrap(prepared.task.model).config.to_dict()
    shape = shape_of_config(config, name=job.model.name)
    longest, usual_length = _tokens_a_row(prepared)
    lengths = (
        job.model_copy(update={"train": job.train.model_copy(update={"seq_len": length})})
        for length in (longest, max(1, round(usual_length)))
    )
    fullest, usual = (
        setting_of_job(one, cluster, work_of_shape(one, shape, precision=prepared.device.precision)) for one in lengths
    )
    _, memory = peak_memory(fullest)
    time = step_time(usual)
    bare = (setting_of_job(job, replace(cluster, corrections=()), s.work) for s in (fullest, usual))
    cpu = cluster.device.is_cpu
    correction = cluster.correction(fullest.work.precision, fullest.work.tuning)
    return Predicted(
        layout=layout_of(job).describe(),
        micro_batch=fullest.micro_batch,
        accumulation=fullest.micro_batches,
        longest=longest,
        mean=usual_length,
        model=job.model.name,
        precision=fullest.work.precision,
        tuning=fullest.work.tuning,
        device=processor_name() if cpu else cluster.device.name,
        threads=max(1, cluster.host_cores // per_machine) if cpu else 0,
        machines=cluster.nodes,
        per_machine=per_machine,
        calibration=cluster.calibration.date if cluster.calibration else None,
        corrected_by=correction.run if correction else None,
        memory=dict(peak_memory(next(bare))[1].parts),
        time=dict(step_time(next(bare)).parts),
        peak=memory.peak,
        upper=memory.upper,
        seconds=time.total,
    )


def _tokens_a_row(prepared: Prepared) -> tuple[int, float]:
    """(in the fullest forward pass, on the mean) tokens of each row of a micro-batch.

    Rows that are laid end to end vary less together than alone: beyond three deviations none is expected, nor beyond
    the longest. That beginnings they share are computed once is not counted.
    """
    train, audit = prepared.job.train, prepared.audit
    assert audit is not None and train.seq_len != "auto" and train.micro_batch != "auto"
    if train.pack:
        return train.seq_len, float(train.seq_len)
    fullest = min(train.seq_len, audit.longest, audit.mean + 3 * audit.deviation / sqrt(train.micro_batch))
    return max(1, round(fullest)), min(train.seq_len, audit.mean)


def compared(before: Comparison, folder: RunFolder, device: Device, *, resumed: int) -> Comparison:
    """The prediction beside what was measured since the run began or went on; a collective.

    Args:
        resumed: the step that it went on after.
    """
    peaks = together(device.peak_memory)
    if rank() != 0:
        return before
    lines = [line for line in folder.read_metrics() if line["step"] > resumed]
    return Comparison(before.predicted, before.why_not, measured_of(lines, memory=max(peaks) * 2**30))
