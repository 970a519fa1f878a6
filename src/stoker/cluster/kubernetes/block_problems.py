"""Conflicts between keys of the block: gangs that a kind does not support, volumes, labels, resources, secrets."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator

from stoker.cluster.kubernetes.manifest_fields import OWN_LABELS, STOKER
from stoker.cluster.kubernetes.node_script import GIVEN, SECRET_FOLDER, WORK
from stoker.cluster.kubernetes.pod_volumes import SSH_FOLDER
from stoker.cluster.secret_names import has_password, is_secret, is_secret_name
from stoker.job.block import default_of
from stoker.job.keys.key_paths import dotted
from stoker.job.targets.kubernetes import KubernetesBlock, gang_of

Found = tuple[str, str, str]  # (key below the block, problem, suggestion)
QUEUED = ("volcano", "kueue", "koordinator", "yunikorn")  # gangs that have queues
SOURCES = ("claim", "host_path", "config_map", "secret", "nfs", "empty")
# Keys with which Stoker writes the same label or annotation.
KEYED = {
    "kueue.x-k8s.io/queue-name": "queue",
    "kueue.x-k8s.io/priority-class": "workload_priority",
    "k8s.v1.cni.cncf.io/networks": "networks",
    "yunikorn.apache.org/queue": "queue",
    "quota.scheduling.koordinator.sh/name": "queue",
}
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.I)


def block_problems(block: KubernetesBlock) -> list[Found]:
    """Returns all conflicts of a block."""
    return [problem for check in CHECKS for problem in check(block)]


def on_a_volume(block: KubernetesBlock, path: str) -> bool:
    """Returns whether a folder of the containers outlives a pod: on a claim, a host path or an NFS export."""
    lasting = [volume.at for volume in block.volumes if volume.claim or volume.host_path or volume.nfs]
    if block.fluid is not None and not block.fluid.read_only:
        lasting.append(block.fluid.at)
    return any(f"{path.rstrip('/')}/".startswith(f"{at.rstrip('/')}/") for at in lasting)


def volume_of(block: KubernetesBlock, path: str) -> int | None:
    """Returns the index of the volume that contains a path of the containers; None if it is on none."""
    inside = [index for index, volume in enumerate(block.volumes) if _is_below(path, volume.at)]
    return max(inside, key=lambda index: len(posixpath.normpath(block.volumes[index].at)), default=None)


def _is_below(path: str, folder: str) -> bool:
    return f"{posixpath.normpath(path)}/".startswith(f"{posixpath.normpath(folder).rstrip('/')}/")


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
    if block.queue is not None and gang in QUEUED:
        fits = DNS_NAME if gang in ("volcano", "kueue") else LABEL_VALUE
        if not fits.fullmatch(block.queue):
            form = (
                "lower-case letters, digits, `-` and `.`" if fits is DNS_NAME else "letters, digits, `-`, `_` and `.`"
            )
            yield "queue", f"`{block.queue}` is not the name of a queue of {gang}", f"a name has {form}"
    if block.workload_priority is not None and gang != "kueue":
        yield "workload_priority", "this is a priority of Kueue's", "write gang: kueue, or `priority`"
    if block.topology_tier is not None and gang != "volcano":
        yield "topology_tier", "tiers are those of Volcano's hypernodes", "write gang: volcano, or topology: LABEL"


def _kinds(block: KubernetesBlock) -> Iterator[Found]:
    if block.kind == "volcano" and block.time_limit is not None:
        hint = "write kind: job or kind: jobset with gang: volcano, or remove it"
        yield "time_limit", "a Volcano Job has no limit of its time", hint
    if block.kind == "rayjob":
        if block.ttl is not None:
            yield "ttl", "KubeRay would keep the GPUs of the finished run for that time", "remove it"
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
    for name, value in block.environment.items():
        if name in block.secrets:
            yield f"environment.{name}", f"{name} is also in `secrets`, which would replace it", "keep one of them"
        elif is_secret(name, value):
            hint = f"write secrets: {{{name}: SECRET/KEY}}, the secret's name and the key in it"
            yield f"environment.{name}", f"the value of {name} could be read in the manifest", hint

    for index, mount in enumerate(block.fluid.mounts if block.fluid is not None else ()):
        here = f"fluid.mounts[{index}]"
        for name, value in mount.options.items():
            if is_secret_name(name) or has_password(value):
                hint = f"write secrets: {{{name}: SECRET/KEY}} beside `options`, the secret's name and the key in it"
                yield f"{here}.options", f"the value of {name} could be read in the manifest", hint
        for name in mount.options.keys() & mount.secrets.keys():
            yield f"{here}.secrets", f"{name} is also in `options`", "keep one of them"
        if has_password(mount.url):
            hint = "write the password as an option under `secrets`"
            yield f"{here}.url", "the password in the URL could be read in the manifest", hint


def _labels(block: KubernetesBlock) -> Iterator[Found]:
    for key in ("labels", "annotations"):
        for name in getattr(block, key):
            if name in OWN_LABELS or name.startswith(f"{STOKER}/"):
                yield key, f"`{name}` is set by Stoker, which finds the run by it", "use another name"
            elif name in KEYED and getattr(block, KEYED[name]):
                yield key, f"`{name}` is set by Stoker from `{KEYED[name]}`", "keep one of them"


def _amounts(block: KubernetesBlock) -> Iterator[Found]:
    for key in ("cpu", "memory"):
        amount = getattr(block, key)
        if isinstance(amount, str) and not float(re.sub(r"[A-Za-z]+$", "", amount)):
            yield key, f"`{key}: {amount}` is nothing", "write an amount above 0, or remove it"
        if amount is not None and key in block.resources:
            yield f"resources.{key}", f"`{key}` is also given beside `resources`", "keep one of them"
    if block.device_class is not None and block.gpu not in ("none", default_of(KubernetesBlock, "gpu")):
        yield "gpu", "`device_class` requests the devices instead of `gpu`", "keep one of them"
    elif block.device_class is None and block.gpu in block.resources:
        hint = f"remove it, or write `gpu: none` to request {block.gpu} for the whole pod"
        yield f"resources.{block.gpu}", f"each process gets one {block.gpu} already, by `gpu`", hint
    if block.rdma is not None and block.rdma.device_class is None and block.rdma.resource in block.resources:
        message = f"`rdma` requests {block.rdma.resource} already"
        yield f"resources.{block.rdma.resource}", message, "write `count` in `rdma`, or remove it"
    rdma = block.rdma
    if rdma is not None and rdma.device_class is not None and rdma.resource != default_of(type(rdma), "resource"):
        yield "rdma.resource", "`device_class` requests the cards instead of `resource`", "keep one of them"


def _texts(block: KubernetesBlock) -> Iterator[Found]:
    if re.search(r"\s", block.image):
        yield (
            "image",
            f"`{block.image}` is not an image: it has a space",
            "write, for example, registry.example.org/stoker:1",
        )
    if block.interface is not None and re.search(r"\s", block.interface):
        yield "interface", f"`{block.interface}` is not a network interface: it has a space", "write, for example, eth0"
    if block.namespace is not None and not DNS_LABEL.fullmatch(block.namespace):
        hint = "a namespace has at most 63 lower-case letters, digits and `-`"
        yield "namespace", f"`{block.namespace}` is not the name of a namespace", hint
    names: set[str] = set()
    for index, mount in enumerate(block.fluid.mounts if block.fluid is not None else ()):
        here = f"fluid.mounts[{index}]"
        if not URL.fullmatch(mount.url):
            yield f"{here}.url", f"`{mount.url}` is not a URL", "write, for example, s3://bucket/folder or pvc://claim"
        if mount.name in names:
            yield f"{here}.name", f"two mounts have the name `{mount.name}`", "give each its own `name`"
        names.add(mount.name)


def _volumes(block: KubernetesBlock) -> Iterator[Found]:
    places = dict.fromkeys((GIVEN, SECRET_FOLDER, WORK), "Stoker's own files")
    if block.shared_memory != "none":
        places["/dev/shm"] = "`shared_memory`"
    if block.ssh_secret is not None:
        places[SSH_FOLDER] = "`ssh_secret`"
    for index, volume in enumerate(block.volumes):
        here = dotted(("volumes", index))
        named = [key for key in SOURCES if getattr(volume, key) is not None]
        if len(named) != 1:
            what = "none of" if not named else f"{' and '.join(named)}, and one of"
            yield (
                here,
                f"a volume is one thing; this one has {what} {', '.join(SOURCES)}",
                "write, for example, claim: NAME",
            )
        yield from _placed(places, f"{here}.at", volume.at)
        inner = volume.sub_path
        if inner is not None and (inner.startswith("/") or ".." in inner.split("/")):
            message = f"`{inner}` is not a folder of the volume"
            yield f"{here}.sub_path", message, "write a relative path without `..`, such as team/runs"
    if block.fluid is not None:
        yield from _placed(places, "fluid.at", block.fluid.at)
        if block.fluid.preload and block.namespace is None:
            hint = "write `namespace: NAME`, or preload: false in `fluid`"
            yield "fluid.preload", "Fluid's loading has to name its namespace", hint
    for index, toleration in enumerate(block.tolerations):
        if toleration.seconds is not None and toleration.effect != "NoExecute":
            hint = "write effect: NoExecute, or remove it"
            yield f"tolerations[{index}].seconds", "seconds are those of the effect NoExecute", hint


def _placed(places: dict[str, str], key: str, at: str) -> Iterator[Found]:
    place = posixpath.normpath(at)
    if ".." in at.split("/"):
        yield key, f"`{at}` has `..`", f"write {place}"
    if place.strip("/") == "":
        yield key, "a volume at / would hide the image", "mount it at a folder, such as /data"
    elif place in places:
        yield key, f"{at} is mounted twice, here and by {places[place]}", "give one of them another folder"
    elif _is_below(place, GIVEN) or _is_below(place, SECRET_FOLDER):
        yield key, f"{at} is in a folder of Stoker's own files, which is read-only", "give it another folder"
    places.setdefault(place, f"`{key}`")


CHECKS: tuple[Callable[[KubernetesBlock], Iterator[Found]], ...] = (
    _gangs, _kinds, _alignment, _readable_secrets, _labels, _amounts, _texts, _volumes
)  # fmt: skip
