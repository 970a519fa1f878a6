"""Seconds of an optimizer step: passes, the pipeline's bubble, collectives of gradients, the optimizer, rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.plan.block_dtypes import FLOAT
from stoker.plan.memory.stoker_memory import sent_types, stage_activations, weight_bytes
from stoker.plan.param_placement import most_held, sharded, stepped_parameters
from stoker.plan.pipeline.bubble import step_seconds
from stoker.plan.pipeline.timeline import StageTime
from stoker.plan.setting import Setting
from stoker.plan.time.calibrated_time import measured_passes
from stoker.plan.time.efficiency import Efficiency, efficiency_of
from stoker.plan.time.gradient_traffic import GradientTraffic, gradient_traffic
from stoker.plan.time.muon_time import muon_seconds
from stoker.plan.time.network_cost import send_seconds
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.rollout_time import rollouts_of

HOST_GBS = 20  # GB/s of the host's memory that one process of several gets
ADAM_BYTES = 28  # read and written per parameter: weight, gradient, moments, master copy
BACKWARD_SHARE = 0.66  # of the passes of a micro-batch
ROLLOUTS = "rollouts"  # the part of a step that is its share of a round of answers


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        parts: seconds by cause; exposed ones only, so that they add up.
    """

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_time(setting: Setting, efficiency: Efficiency | None = None, *, passes: PassTimes | None = None) -> StepTime:
    """Returns the seconds of one optimizer step, by cause.

    Args:
        passes: a cache shared by several settings of the same work on the same devices.
    """
    efficiency = efficiency or efficiency_of(setting.cluster.device)
    layout = setting.layout
    stages = (passes or PassTimes(efficiency)).stages(setting)
    work = slowest_pass(setting, stages) * setting.micro_batches
    parts = {"compute": work}
    if layout.pipeline > 1:
        parts |= _pipeline(setting, stages, efficiency, work)
    parts["data parallel"] = data_parallel(setting, stages, efficiency).exposed
    if layout.offload == "activations":
        parts["activation copies"] = _activation_copies(setting, stages)
    parts["optimizer"] = _optimizer(setting, efficiency)
    correction = setting.cluster.correction(setting.work.precision, setting.work.tuning)
    if correction is not None:
        parts = correction.time_parts(parts)
    if setting.work.critic is not None:
        parts["critic"] = step_time(replace(setting, work=setting.work.critic), efficiency).total
    if (rollouts := rollouts_of(setting, efficiency)) is not None:
        parts[ROLLOUTS] = rollouts.of_step
    return StepTime(parts)


def slowest_pass(setting: Setting, stages: Sequence[StageTime]) -> float:
    """Seconds of a micro-batch, both ways, in the process of the pipeline that takes longest."""
    return max(sum(stages[stage].total for stage in own) for own in setting.homes)


def data_parallel(setting: Setting, stages: Sequence[StageTime], efficiency: Efficiency) -> GradientTraffic:
    """Returns collectives of gradients and weights, overlapped with the passes of the pipeline's slowest process."""
    slowest = slowest_pass(setting, stages)
    return gradient_traffic(setting, efficiency, compute=slowest * setting.micro_batches, last=slowest * BACKWARD_SHARE)


def _pipeline(setting: Setting, stages: Sequence[StageTime], efficiency: Efficiency, work: float) -> dict[str, float]:
    """Returns the bubble and exposed sends of a pipeline, in addition to the work of its slowest process."""
    layout = setting.layout
    waits, sends = (
        step_seconds(layout.schedule, stages, processes=layout.pipeline, micro_batches=setting.micro_batches, send=way)
        for way in (0.0, exposed_send(setting, efficiency))
    )
    return {"bubble": max(0.0, waits - work), "pipeline sends": sends - waits}


def exposed_send(setting: Setting, efficiency: Efficiency) -> float:
    """Returns the exposed seconds of a send between two stages."""
    layout = setting.layout
    message = (
        setting.tokens * setting.shape.width * sent_types(setting).stream / (layout.tensor if layout.sequence else 1)
    )
    stride = layout.tensor * layout.context * layout.data
    send = send_seconds(message, stride=stride, cluster=setting.cluster, efficiency=efficiency)
    return send * setting.software.exposed_sends


def _activation_copies(setting: Setting, stages: Sequence[StageTime]) -> float:
    """Returns the seconds by which copies of activations exceed the passes that they run beside."""
    copies = stage_activations(setting, 0).on_host / (setting.cluster.device.host_gbs * 1e9)
    forward = sum(stage.forward for stage in stages)
    backward = sum(stage.total for stage in stages) - forward
    return setting.micro_batches * (max(0.0, copies - forward) + max(0.0, copies - backward))


def _optimizer(setting: Setting, efficiency: Efficiency) -> float:
    layout = setting.layout
    parameters = stepped_parameters(setting)
    device = setting.cluster.device
    if layout.steps_on_host:  # gradients down, weights up, and the host's own memory
        fetched = 0.0
        if layout.offload == "params":  # gathered weights are fetched first, forward and backward
            held = sharded(setting, most_held(setting))
            fetched = 2 * weight_bytes(setting) * held * setting.micro_batches
        return max((2 * FLOAT * parameters + fetched) / device.host_gbs, ADAM_BYTES * parameters / HOST_GBS) / 1e9
    muon = muon_seconds(setting, efficiency) if setting.software.muon else 0.0
    if measured := measured_passes(setting):
        return muon + measured.optimizer_seconds(setting)
    return muon + parameters * ADAM_BYTES / (device.memory_gbs * 1e9 * efficiency.bandwidth)
