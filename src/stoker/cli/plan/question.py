"""The planner's question that a command line asks: a job's work on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from stoker.cluster.planned_cluster import PlannedCluster
    from stoker.job import LoadedJob
    from stoker.plan.answer.full_answer import PlanQuestion


def planned_on(loaded: LoadedJob, arguments: argparse.Namespace) -> PlannedCluster:
    """Returns the cluster of the command line or of the job's target, and prints the target's nodes."""
    from stoker.cluster.chosen_target import split_overrides
    from stoker.cluster.planned_cluster import planned_cluster

    _, of_target = split_overrides(arguments.on, arguments.overrides)
    found = planned_cluster(loaded, arguments.on, overrides=of_target, targets=not arguments.cluster_only)
    if found.target and not arguments.json:
        cluster = found.cluster
        nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} with {cluster.per_node} x {cluster.device.name}"
        print(f"target {found.target}: {nodes}")
    return found


def question_on(loaded: LoadedJob, planned: PlannedCluster) -> PlanQuestion:
    """Returns the planner's question for a resolved job and a cluster."""
    from stoker.job.layout import layout_of
    from stoker.job.load_job import with_nodes
    from stoker.plan.answer.cost import Length
    from stoker.plan.answer.full_answer import PlanQuestion
    from stoker.plan.planned_job import setting_of_job, software_of_job, work_of

    cluster = planned.cluster
    loaded = with_nodes(loaded, cluster.nodes)
    work = work_of(loaded, cluster)
    if loaded.origins["train.batch"].source == "default":  # at least a row for each device
        work = work.resized(global_batch=-(-work.global_batch // cluster.gpus) * cluster.gpus)
    stated = any(key.startswith("parallel.") and o.source != "default" for key, o in loaded.origins.items())
    asked, asked_devices = None, None
    if stated and not loaded.document.planned:
        world = layout_of(loaded.job).world
        if world == cluster.gpus:
            asked = setting_of_job(loaded.job, cluster, work)
        elif any(loaded.origins[key].source != "default" for key in ("parallel.data", "parallel.devices")):
            asked_devices = world  # else it takes the devices that there are
    software = software_of_job(loaded.job, work.shape)
    return PlanQuestion(work, cluster, planned.on, Length.of(loaded.job), software, asked, asked_devices)
