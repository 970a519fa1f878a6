"""Conflicts between keys of the block: gangs that a kind does not support, volumes, claims, readable secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from stoker.job.key_paths import dotted
from stoker.job.targets.kubernetes import KubernetesBlock, gang_of
from stoker.job.targets.kubernetes_parts import VolumeBlock

Found = tuple[str, str, str]  # (key below the block, problem, suggestion)
QUEUED = ("volcano", "kueue", "koordinator", "yunikorn")  # gangs that have queues
SOURCES = ("claim", "host_path", "config_map", "secret", "nfs", "empty")
_SECRET = re.compile(r"(?i)token|secret|passw|credential|(api|access|private)_?key")


def block_problems(block: KubernetesBlock) -> list[Found]:
    """Returns all conflicts of a block."""
    return [problem for check in CHECKS for problem in check(block)]


def is_secret(name: str) -> bool:
    """Returns whether the name of a variable suggests a secret value."""
    return _SECRET.search(name) is not None


def on_a_volume(block: KubernetesBlock, path: str) -> bool:
    """Returns whether a folder of the containers outlives a pod: on a claim, a host path or an NFS export."""
    lasting = [volume.at for volume in block.volumes if volume.claim or volume.host_path or volume.nfs]
    if block.fluid is not None and not block.fluid.read_only:
        lasting.append(block.fluid.at)
    return any(f"{path.rstrip('/')}/".startswith(f"{at.rstrip('/')}/") for at in lasting)


def _gangs(block: KubernetesBlock) -> Iterator[Found]:
    gang = gang_of(block)
    if block.kind == "volcano" and gang != "volcano":
        message = f"a Volcano Job is scheduled by Volcano, and not by `gang: {gang}`"
        yield "gang", message, "write gang: volcano, or kind: job"
    if gang == "kueue" and block.queue is None:
        yield "gang", "Kueue takes a run from a queue, and none is named", "write queue: NAME of a LocalQueue"
    if block.queue is not None and gang not in QUEUED:
        yield (
            "queue",
            f"`queue` has no meaning with `gang: {gang}`",
            f"write gang: {', '.join(QUEUED[:-1])} or {QUEUED[-1]}",
        )
    if block.workload_priority is not None and gang != "kueue":
        yield "workload_priority", "this is a priority of Kueue's", "write gang: kueue, or `priority`"
    if block.topology_tier is not None and gang != "volcano":
        yield "topology_tier", "tiers are those of Volcano's hypernodes", "write gang: volcano, or topology: LABEL"


def _kinds(block: KubernetesBlock) -> Iterator[Found]:
    if block.kind == "volcano" and block.time_limit is not None:
        hint = "write kind: job or kind: jobset with gang: volcano, or remove it"
        yield "time_limit", "a Volcano Job has no limit of its time", hint
    if block.kind == "rayjob":
        for key in ("mpi", "ssh_secret"):
            if getattr(block, key):
                yield key, "a RayJob starts its processes by Ray, and not by MPI", "remove it, or write kind: job"
        if block.setup:
            yield "setup", "KubeRay starts Ray in the pods, and runs nothing before", "build it into the image"
    elif block.ray_version is not None:
        yield "ray_version", "only a RayJob has a version of Ray", "remove it, or write kind: rayjob"


def _alignment(block: KubernetesBlock) -> Iterator[Found]:
    if block.alignment != "pcie":
        return
    if block.rdma is None:
        yield (
            "alignment",
            "`pcie` pairs devices with RDMA cards, and there is no `rdma`",
            "write rdma: {resource: NAME}",
        )
    elif gang_of(block) != "koordinator" and not (block.device_class and block.rdma.device_class):
        hint = "write gang: koordinator, or `device_class` here and in `rdma`"
        yield "alignment", "nothing here can choose devices by their PCIe root", hint


def _readable_secrets(block: KubernetesBlock) -> Iterator[Found]:
    for name in block.environment:
        if is_secret(name):
            hint = f"write secrets: {{{name}: SECRET/KEY}}, the secret's name and the key in it"
            yield f"environment.{name}", f"the value of {name} could be read in the manifest", hint


def _volumes(block: KubernetesBlock) -> Iterator[Found]:
    places: dict[str, str] = {}
    for index, volume in enumerate(block.volumes):
        here = dotted(("volumes", index))
        named = sources_of(volume)
        if len(named) != 1:
            what = "none of" if not named else f"{' and '.join(named)}, and one of"
            yield here, f"a volume is one thing; this one has {what} {', '.join(SOURCES)}", "write such as claim: NAME"
        yield from _placed(places, f"{here}.at", volume.at)
    if block.fluid is not None:
        yield from _placed(places, "fluid.at", block.fluid.at)
        if block.fluid.preload and block.namespace is None:
            hint = "write `namespace: NAME`, or preload: false in `fluid`"
            yield "fluid.preload", "Fluid's loading has to name its namespace", hint
    for index, toleration in enumerate(block.tolerations):
        if toleration.seconds is not None and toleration.effect != "NoExecute":
            hint = "write effect: NoExecute, or remove it"
            yield f"tolerations[{index}].seconds", "seconds are those of the effect NoExecute", hint


def sources_of(volume: VolumeBlock) -> list[str]:
    """Returns the keys that define the volume's source."""
    return [key for key in SOURCES if getattr(volume, key) is not None]


def _placed(places: dict[str, str], key: str, at: str) -> Iterator[Found]:
    place = at.rstrip("/")
    if place in places:
        yield key, f"{at} is mounted twice, here and by {places[place]}", "give one of them another folder"
    places[place] = key


CHECKS: tuple[Callable[[KubernetesBlock], Iterator[Found]], ...] = (
    _gangs, _kinds, _alignment, _readable_secrets, _volumes
)  # fmt: skip
