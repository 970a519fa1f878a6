"""A plan's step as a timeline: what each pipeline stage takes, in the order of its schedule."""

from __future__ import annotations

from stoker.plan.activations import HALF
from stoker.plan.efficiency import efficiency_of
from stoker.plan.network import send_seconds
from stoker.plan.pipeline.schedule import order
from stoker.plan.pipeline.timeline import StageTime, Timeline, simulate
from stoker.plan.setting import Setting
from stoker.plan.step_time import Passes

DRAWN = 48  # passes forward of a process that a picture has room for


def stage_times(setting: Setting) -> tuple[StageTime, ...]:
    """Seconds of a micro-batch in each stage, first to last."""
    return Passes().stages(setting)


def drawn_micro_batches(setting: Setting) -> int:
    """Of a step's micro-batches, so many that they can be told apart in a picture and the schedule can run them."""
    processes, count = setting.layout.pipeline, setting.micro_batches
    rounds = max(1, DRAWN // (processes * setting.layout.stages_per_process))
    return min(count, rounds * processes)


def timeline_of(setting: Setting, *, micro_batches: int | None = None) -> Timeline:
    """The passes of one step; what data parallelism and the optimizer add comes after them.

    Args:
        micro_batches: by default all of the step's.
    """
    layout, cluster = setting.layout, setting.cluster
    message = setting.tokens * setting.shape.width * HALF / (layout.tensor if layout.sequence else 1)
    stride = layout.tensor * layout.context * layout.data
    send = 0.0
    if layout.pipeline > 1:
        send = send_seconds(message, stride=stride, cluster=cluster, efficiency=efficiency_of(cluster.device))
        send *= setting.software.exposed_sends
    schedule = layout.schedule if layout.pipeline > 1 else "1f1b"
    made = order(schedule, processes=layout.pipeline, micro_batches=micro_batches or setting.micro_batches)
    return simulate(made, stage_times(setting), send=send)
