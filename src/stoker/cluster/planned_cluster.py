"""The cluster that `stoker plan` plans for: a description of devices, or the nodes of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.chosen_target import (
    SUFFIXES,
    ChosenTarget,
    choose_target,
    configured_targets,
    named_target,
    targets_file,
)
from stoker.cluster.target import open_target
from stoker.errors import Problem, UserError, did_you_mean, placed_errors
from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job.document.text_file import read_text
from stoker.job.document.yaml_document import parse_document
from stoker.job.keys.key_paths import TARGET
from stoker.job.load_job import LoadedJob
from stoker.job.targets import KINDS, LOCAL
from stoker.job.targets.shared_keys import TargetKeys


@dataclass(frozen=True)
class PlannedCluster:
    """A cluster and its description.

    Attributes:
        on: the short form or the file from which it was read.
        target: the target whose nodes it has: its name, or its kind in the job; empty for a cluster alone.
    """

    cluster: Cluster
    on: str
    target: str = ""


def planned_cluster(
    loaded: LoadedJob, on: str | None, *, overrides: Sequence[str] = (), targets: bool = True
) -> PlannedCluster:
    """Returns the cluster of ``--on``, or else of the job's target; this machine where both are absent.

    A name in targets.yaml comes before a short form of the same name.

    Args:
        overrides: keys of the target that ``on`` names; see `split_overrides`.
        targets: whether to look targets up; otherwise ``on`` is a cluster, by default this machine.

    Raises:
        UserError: ``on`` is neither a cluster nor a target, or the target does not say what its nodes are.
    """
    chosen = _target(loaded, on, overrides) if targets else None
    if chosen is None and overrides:
        hint = "remove it, or name a target with `--on`"
        raise UserError(Problem(f"`{overrides[0]}` has no effect: {on} is a cluster, not a target", hint))
    if chosen is None:
        return PlannedCluster(_described(on or LOCAL, targets=targets), on or LOCAL)
    keys = chosen.block
    assert isinstance(keys, TargetKeys)
    if keys.cluster is None:
        hint = f"write `cluster: 4x8xH100` under `{chosen.kind}:`, or plan for other devices with `--on 4x8xH100`"
        raise UserError(chosen.problem("", "the target does not say what its nodes are", hint))
    cluster = target_cluster(chosen, keys, keys.cluster, open_target(chosen).host_count())
    return PlannedCluster(cluster, keys.cluster, chosen.name or chosen.kind)


def target_cluster(chosen: ChosenTarget, keys: TargetKeys, description: str, hosts: int | None) -> Cluster:
    """Returns the nodes of a target: its `cluster` with its `nodes`, or its hosts where that is a single node.

    Args:
        description: the target's `cluster`.
        hosts: number of the target's hosts, if known.

    Raises:
        UserError: the cluster cannot be read, or differs from the target's `nodes` or `devices`.
    """
    with placed_errors(lambda p: p if p.line else chosen.problem("cluster", p.message, p.suggestion)):
        cluster = load_cluster(description)
    if keys.nodes != "auto" and cluster.nodes not in (1, keys.nodes):
        nodes = f"`cluster: {description}` has {cluster.nodes} nodes, and `nodes` is {keys.nodes}"
        raise UserError(chosen.problem("nodes", nodes, "remove `nodes`, or write a cluster of one node"))
    if keys.nodes == "auto" and hosts is not None and cluster.nodes not in (1, hosts):
        message = (
            f"`cluster: {description}` has {cluster.nodes} nodes, and the target has {hosts} host{'s' * (hosts > 1)}"
        )
        hint = f"write a cluster of one node, which counts for each host, or name {cluster.nodes} hosts"
        raise UserError(chosen.problem("cluster", message, hint))
    if keys.devices not in ("auto", cluster.per_node):
        message = f"`cluster: {description}` has {cluster.per_node} devices a node, and `devices` is {keys.devices}"
        raise UserError(chosen.problem("devices", message, "remove `devices`"))
    nodes_known = keys.nodes if keys.nodes != "auto" else hosts
    return cluster.with_nodes(nodes_known) if nodes_known is not None and cluster.nodes == 1 else cluster


def _target(loaded: LoadedJob, on: str | None, overrides: Sequence[str]) -> ChosenTarget | None:
    """Returns the target that ``on`` or the job names; None where that is a cluster or this machine."""
    if on is None:
        return None if loaded.job.target == LOCAL else choose_target(loaded, None)
    if on == LOCAL:
        return None
    if not (_is_target_file(Path(on)) if on.endswith(SUFFIXES) else on in configured_targets().data):
        return None
    return named_target(on, overrides=overrides)


def _is_target_file(path: Path) -> bool:
    """Returns whether a file has a target's block instead of a cluster's keys."""
    if not path.is_file():
        return False
    data = parse_document(read_text(path), file=str(path)).data
    return isinstance(data, dict) and ([*data] == [TARGET] or not KINDS.keys().isdisjoint(data))


def _described(on: str, *, targets: bool) -> Cluster:
    """Returns the cluster of a file or a short form.

    Raises:
        UserError: it is not a cluster; with the nearest target, where one has a similar name.
    """
    try:
        return load_cluster(on)
    except UserError as error:
        if not targets or any(problem.file for problem in error.problems):
            raise
        names = [str(name) for name in configured_targets().data]
        message = f"--on {on}: neither a cluster nor a target of {targets_file()}"
        if hint := did_you_mean(on, names):
            raise UserError(Problem(message, hint)) from error
        if names and not on[:1].isdigit():  # 4x8xH10 is a device that is misspelt
            hint = f"{error.problems[0].suggestion}; targets are {', '.join(names)}"
            raise UserError(Problem(message, hint)) from error
        raise
