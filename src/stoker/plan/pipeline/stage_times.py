"""Timeline of a plan's step: the time of each pipeline stage, in the order of its schedule."""

from __future__ import annotations

from stoker.plan.pipeline.schedule_order import order
from stoker.plan.pipeline.timeline import Timeline, simulate
from stoker.plan.setting import Setting
from stoker.plan.time.efficiency import efficiency_of
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.step_time import exposed_send

DRAWN = 48  # passes forward of a process that a picture has room for


def drawn_micro_batches(setting: Setting) -> int:
    """Number of micro-batches to draw: few enough to be distinguishable, and a number that the schedule can run."""
    processes, count = setting.layout.pipeline, setting.micro_batches
    rounds = max(1, DRAWN // (processes * setting.layout.stages_per_process))
    return min(count, rounds * processes)


def timeline_of(setting: Setting, *, micro_batches: int | None = None) -> Timeline:
    """Returns the passes of one step; data parallelism and the optimizer come after them.

    Args:
        micro_batches: by default all of the step's.
    """
    layout = setting.layout
    pipelined = layout.pipeline > 1
    schedule = layout.schedule if pipelined else "1f1b"
    send = exposed_send(setting, efficiency_of(setting.cluster.device)) if pipelined else 0.0
    made = order(schedule, processes=layout.pipeline, micro_batches=micro_batches or setting.micro_batches)
    return simulate(made, PassTimes().stages(setting), send=send)
