"""The JSON of ``stoker plan JOB --json``. Times in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from stoker.hardware.machines.cluster import Cluster
from stoker.json_values import finite
from stoker.plan.answer.cost import Cost, cost_of
from stoker.plan.answer.full_answer import NothingFits, PlanAnswer, verdict
from stoker.plan.answer.setting_to_yaml import job_values
from stoker.plan.memory.memory_formulas import Memory
from stoker.plan.pipeline.communication import communication_of
from stoker.plan.pipeline.stage_times import drawn_micro_batches, timeline_of
from stoker.plan.reliability import Forecast
from stoker.plan.search import LayoutPlan
from stoker.plan.setting import TrainingWork
from stoker.plan.time.rollout_time import rollouts_of
from stoker.plan.time.speed import mfu_formula
from stoker.units import GIB

AFTER = ("data parallel", "optimizer")  # parts that follow the passes of a step


def answer_json(found: PlanAnswer | NothingFits) -> dict[str, Any]:
    """Returns the whole answer; infinite numbers are None."""
    question = found.question
    head = {
        "cluster": _cluster(question.cluster),
        "model": {
            "name": question.work.shape.name,
            "parameters": question.work.shape.parameters,
            "active_parameters": question.work.shape.active_parameters,
        },
        "work": _work(question.work),
        "looked_at": found.looked_at,
        "notes": list(question.notes),
    }
    if isinstance(found, NothingFits):
        changes = [
            {
                **_values(change, ("what", "words", "factor")),
                "cluster_gpus": change.plan.setting.cluster.gpus,
                **plan_json(change.plan),
            }
            for change in found.changes
        ]
        nearest = plan_json(found.nearest) if found.nearest is not None else None
        return finite({"plan": None, "nearest": nearest, "changes": changes, **head})
    result = {
        "plan": plan_json(found.plan, stages=found.stages),
        "run": _run(found.cost),
        "binds": [
            {
                "resource": bottleneck.resource,
                "seconds": bottleneck.seconds,
                "causes": [{"name": str(cause), "seconds": cause.seconds} for cause in bottleneck.causes],
            }
            for bottleneck in found.bottlenecks
        ],
        "helps": [
            {**_values(change, ("change", "words", "gain", "gain_per_device")), **plan_json(change.plan)}
            for change in found.faster_changes
        ],
        "alternatives": [
            {**_values(other, ("called", "reason", "slower")), **plan_json(other.plan)}
            | {"price": cost_of(other.plan, question.length).price}
            for other in found.alternatives
        ],
        "seconds": found.seconds,
    }
    return finite({**result, **head})


def timeline_json(plan: LayoutPlan) -> dict[str, Any]:
    """Returns one step of each process of the pipeline, of as many micro-batches as are drawn; times from its start.

    A communication takes ``seconds`` between ``start`` and ``end``; ``exposed`` of them overlap with no pass.
    """
    drawn, parts = drawn_micro_batches(plan.setting), plan.time.parts
    timeline = timeline_of(plan.setting, micro_batches=drawn)
    traffic = communication_of(
        plan.setting, timeline, after=parts.get("data parallel", 0.0), of=plan.setting.micro_batches
    )
    return {
        "micro_batches": drawn,
        "of": plan.setting.micro_batches,
        "seconds": timeline.seconds,
        "after": {name: parts[name] for name in AFTER if parts.get(name)},
        "processes": [
            {"idle": idle, "spans": [span._asdict() for span in spans], "communication": list(map(asdict, messages))}
            for idle, spans, messages in zip(timeline.idle, timeline.processes, traffic, strict=True)
        ],
    }


def plan_json(plan: LayoutPlan, *, stages: tuple[Memory, ...] | None = None) -> dict[str, Any]:
    """Converts a plan to JSON types; includes the memory of each stage if it is given, or there is only one stage."""
    setting, speed = plan.setting, plan.speed
    layout = setting.layout
    result = {
        "layout": asdict(layout),
        "description": layout.describe(),
        "job": job_values(setting),
        "micro_batch": setting.micro_batch,
        "accumulation": setting.micro_batches,
        "step_time_s": plan.seconds,
        "time": dict(plan.time.parts),
        "tokens_per_s": speed.tokens_per_s,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "mfu": speed.mfu,
        "fits": plan.fits,
        "verdict": verdict(plan.memory, plan),
        "memory_gib": plan.memory.peak / GIB,
        "memory_upper_gib": plan.memory.upper / GIB,
        "memory": {part: size / GIB for part, size in plan.memory.parts.items()},
        "capacity_gib": plan.capacity / GIB,
        "fullest_stage": plan.stage + 1,
        "fullest_moment": plan.memory.moment,
        "host_gib": plan.memory.host / GIB,
        "host_capacity_gib": setting.cluster.host_memory_gib_per_gpu,
    }
    if (rollouts := rollouts_of(setting)) is not None:
        result["rollouts"] = {
            **asdict(setting.work.rollouts),  # type: ignore[arg-type]
            "prompt_tokens": setting.work.prompt_tokens,
            "seconds": rollouts.total,
            "prefill_s": rollouts.prefill,
            "decode_s": rollouts.decode,
            "scoring_s": rollouts.scoring,
        }
    if stages is not None:
        result["mfu_formula"] = mfu_formula(setting.work)
        result["timeline"] = timeline_json(plan)
        result["stages"] = [_stage(plan, memory, stage) for stage, memory in enumerate(stages)]
    return result


def _stage(plan: LayoutPlan, memory: Memory, stage: int) -> dict[str, Any]:
    return {
        "stage": stage + 1,
        "blocks": sum(plan.setting.blocks[stage].values()),
        "memory": {part: size / GIB for part, size in memory.parts.items()},
        "moment": memory.moment,
        "memory_gib": memory.peak / GIB,
        "memory_upper_gib": memory.upper / GIB,
        "host_gib": memory.host / GIB,
        "verdict": verdict(memory, plan),
    }


OF_CLUSTER = (
    *("name", "gpus", "nodes", "per_node", "network_gbs", "host_memory_gib", "currency"),
    *("failures_per_gpu_hour", "monthly_availability"),
)


def _cluster(cluster: Cluster) -> dict[str, Any]:
    device = {"device": cluster.device.name, "memory_gib": cluster.device.memory_gib}
    return {**_values(cluster, OF_CLUSTER), **device, "price_per_hour": cluster.total_price_per_hour}


def _work(work: TrainingWork) -> dict[str, Any]:
    return {
        "seq_len": work.seq_len,
        "batch": work.global_batch,
        "precision": work.precision,
        "tune": work.tuning,
        "rank": work.low_rank or None,
        "quantise": work.base,
        "virtual_tokens": work.adapters.tokens,
        "trained_parameters": work.trained,
    }


OF_COST = ("steps", "tokens", "hours", "price", "currency", "hours_per_billion_tokens", "price_per_billion_tokens")


def _run(cost: Cost) -> dict[str, Any]:
    """Cost of the job's steps, or of ``steps`` where ``steps_known`` is false."""
    return {
        **_values(cost, OF_COST),
        "steps_known": cost.known,
        "training_hours": cost.training / 3600,
        "checkpoint_gib": cost.checkpoint / GIB,
        "checkpoint_stall_s": cost.saving.stall,
        "checkpoint_write_s": cost.saving.write,
        "recovery_s": cost.saving.recovery,
        "checkpoint_every_steps": cost.interval_steps,
        **_forecast(cost.forecast),
        "as_written": None if cost.as_written is None else _forecast(cost.as_written),
    }


def _forecast(found: Forecast) -> dict[str, float]:
    return {
        "mean_between_interruptions_s": found.mean_between,
        "chance_of_interruption": found.chance,
        "checkpoint_interval_s": found.interval,
        "recomputation_s": found.recomputation,
        "stalls_s": found.stalls,
        **_values(found, ("interruptions", "effective", "seconds")),
    }


def _values(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes under their own names."""
    return {name: getattr(source, name) for name in names}
