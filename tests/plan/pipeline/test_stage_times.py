"""The timeline of a plan against the step time that is stated of it."""

from __future__ import annotations

import pytest

from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job.layout import Layout, ScheduleName
from stoker.plan.pipeline.stage_times import drawn_micro_batches, timeline_of
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.step_time import step_time


def setting_of(schedule: ScheduleName, pipeline: int, batch: int = 16) -> Setting:
    layout = Layout(pipeline=pipeline, schedule=schedule)
    work = TrainingWork(shape_named("llama2-7b"), 4096, batch)
    return Setting(work, load_cluster(f"{pipeline}xA100-80GB"), layout, 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_the_passes_take_what_the_step_time_says(schedule: ScheduleName) -> None:
    """`step_seconds` is within 8 % of the simulated order; the optimizer comes after the passes."""
    setting = setting_of(schedule, 4)
    parts = step_time(setting).parts
    stated = sum(parts[name] for name in ("compute", "bubble", "pipeline sends"))
    assert timeline_of(setting).seconds == pytest.approx(stated, rel=0.08)


def test_one_process_does_nothing_but_its_passes() -> None:
    setting = setting_of("1f1b", 1)
    timeline = timeline_of(setting)
    assert timeline.seconds == pytest.approx(step_time(setting).parts["compute"])
    assert timeline.idle == pytest.approx((0.0,))


def test_a_v_has_its_first_and_last_stage_on_one_process() -> None:
    """Stages 0 and 7 are the first one's, and with the last the head."""
    setting = setting_of("zbv", 4)
    times = PassTimes().stages(setting)
    assert setting.homes[0] == (0, 7) and setting.last == 0
    assert len(times) == 8 and times[0] == times[6] and times[7].total > times[0].total
    whole = PassTimes().stages(setting_of("1f1b", 4))
    assert sum(time.total for time in times) == pytest.approx(sum(time.total for time in whole))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("batch", [8, 256, 1024])
def test_as_many_micro_batches_are_drawn_as_there_is_room_for(schedule: ScheduleName, batch: int) -> None:
    setting = setting_of(schedule, 8, batch)
    drawn = drawn_micro_batches(setting)
    assert drawn == (8 if batch == 8 else 48 if schedule == "1f1b" else 24)
    assert all(len(spans) <= 6 * 24 for spans in timeline_of(setting, micro_batches=drawn).processes)
