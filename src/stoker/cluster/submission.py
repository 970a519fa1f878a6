"""A job as it is submitted: its text, its files with their fingerprint, and its numbers of nodes and processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.named_files import NamedFiles, named_files, with_paths
from stoker.cluster.private_files import PrivateFile, checked_private
from stoker.cluster.record import Record, name_of
from stoker.cluster.sent_files import ARCHIVE, SentFile, needed_files
from stoker.errors import CannotRun, UserError
from stoker.job.document.job_to_yaml import dump_job
from stoker.job.layout import layout_of
from stoker.job.load_job import LoadedJob, with_nodes
from stoker.job.resolved import ResolvedJob
from stoker.job.targets import LOCAL
from stoker.job.targets.shared_keys import SpareKeys, TargetKeys
from stoker.launch.nodes.shared_storage import needs_shared_storage

JOB = "job.yaml"
SECRET = "secret"
FIRST_PORT, PORTS = 15_000, 17_000  # below the range that systems assign automatically


@dataclass(frozen=True)
class Submission:
    """A job to be sent to a target.

    Attributes:
        name: name of the run and of the record; letters, digits and hyphens.
        loaded: the resolved job, with the planner's layout if it has `parallel: auto`.
        job: the resolved job as YAML, with paths as on the nodes. It includes the overrides.
        nodes, devices: number of nodes, and number of processes on each.
        files: all files to send, `job` among them as ``job.yaml``.
        output: the run's folder: absolute, or relative to the nodes' working folder.
        port: port of the nodes' rendezvous.
        base: the folder in which the command was given.
        stages: names of the stages; empty for a job without stages. With stages `output` is the folder of their runs,
            and `loaded` the first stage's job.
        stage_jobs: the resolved jobs of the stages.
        spares: number of additional nodes that wait until one is lost: the last ones.
        private: secrets that are sent for their owner only; not in the fingerprint.
    """

    name: str
    loaded: LoadedJob
    job: str
    nodes: int
    devices: int
    files: tuple[SentFile, ...]
    output: str
    port: int
    base: Path
    stages: tuple[str, ...] = ()
    private: tuple[PrivateFile, ...] = ()
    stage_jobs: tuple[LoadedJob, ...] = ()
    spares: int = 0

    @property
    def hosts(self) -> int:
        """Number of nodes with the spares."""
        return self.nodes + self.spares

    @property
    def jobs(self) -> list[ResolvedJob]:
        """The jobs of all stages; the only one of a job without stages."""
        return [loaded.job for loaded in self.stage_jobs or (self.loaded,)]

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def sends_code(self) -> bool:
        """Whether Stoker's own code is among the files."""
        return any(file.path == ARCHIVE for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that change with the path or content of any file."""
        digest = hashlib.blake2b(digest_size=32)
        for file in sorted(self.files, key=lambda file: file.path):
            digest.update(f"{file.path}\0{file.digest}\n".encode())
        return digest.hexdigest()

    @property
    def label(self) -> str:
        """Name and first characters of the fingerprint, for messages."""
        return f"{self.name} ({self.fingerprint[:12]})"

    @property
    def least(self) -> int:
        """Minimum number of nodes with which the run starts and continues (`faults.nodes.min`)."""
        stated = self.loaded.job.faults.nodes
        return self.nodes if stated is None or self.stages else stated.min

    @property
    def nodes_option(self) -> str:
        """Value of `stoker node --nodes`: ``MIN:MAX``, or one number if they are equal."""
        return nodes_option(self.least, self.nodes)

    @property
    def needs_shared_storage(self) -> bool:
        """Whether all nodes must see the run's folder."""
        return bool(self.stages) or any(map(needs_shared_storage, self.jobs))

    def record(self, kind: str, *, target: Mapping[str, Any], on: str, handle: Mapping[str, Any]) -> Record:
        """Returns the record of the submission; see `Record`."""
        return Record(
            name=self.name,
            kind=kind,
            target=target,
            on=on,
            time=time.time(),
            fingerprint=self.fingerprint,
            nodes=self.nodes,
            devices=self.devices,
            output=self.output,
            base=str(self.base),
            stages=list(self.stages),
            handle=handle,
        )

    def node_words(self, rendezvous: Sequence[str], *, secret: str = SECRET, job: str = JOB) -> list[str]:
        """Returns the arguments with which a node's Python runs its supervisor.

        Args:
            rendezvous: ``HOST:PORT`` of the nodes, the first one first.
            secret: path of the secret's file on the node.
        """
        words = ["-m", "stoker", "node", job, "--rendezvous", ",".join(rendezvous), "--secret", secret]
        return [*words, "--nodes", self.nodes_option, "--devices", str(self.devices)]


def submission_of(
    loaded: LoadedJob, chosen: ChosenTarget, base: Path, *, name: str | None = None, hosts: int | None = None
) -> Submission:
    """Returns the submission of a job to a target.

    Args:
        base: the folder in which the command was given.
        name: name of the run; by default that of its output folder.
        hosts: the target's number of hosts, if it is known; the default number of nodes.

    Raises:
        UserError: nodes and processes do not agree with the layout, or files that the job needs cannot be read.
        CannotRun: the planner finds no layout for the nodes.
    """
    keys = chosen.block
    assert isinstance(keys, TargetKeys)
    loaded = with_layout(loaded, chosen, keys, hosts)
    nodes, devices = nodes_and_processes(loaded, chosen, keys, hosts)
    check_fault_nodes(loaded, nodes)
    check_synced_store(loaded, nodes)
    loaded = with_nodes(loaded, nodes)
    named = named_files(loaded, base)
    private = checked_private(loaded, named.private.values(), chosen)
    sent = needed_files(named, base, chosen)
    if not keys.in_place:
        loaded = with_paths(loaded, moved_on(named, private))
    text = dump_job(loaded.to_write(target=LOCAL))
    chosen_name = name or name_of(loaded.job.output)
    return Submission(
        name=chosen_name,
        loaded=loaded,
        job=text,
        nodes=nodes,
        devices=devices,
        files=(SentFile.made(JOB, text), *sent),
        output=loaded.job.output,
        port=keys.port if keys.port != "auto" else port_of(chosen_name),
        base=base,
        private=private,
        spares=spares_of(keys),
    )


def nodes_option(least: int, nodes: int) -> str:
    """Returns the value of `stoker node --nodes`: ``MIN:MAX``, or one number if they are equal."""
    return f"{least}:{nodes}" if least < nodes else f"{nodes}"


def path_on_nodes(path: str, folder: str) -> str:
    """Returns a path of the job as the nodes name it: a relative one is in the folder of the submission."""
    return path if "://" in path or path.startswith("/") else f"{folder.rstrip('/')}/{path}"


def spares_of(keys: TargetKeys) -> int:
    """Returns the number of additional nodes that wait until one is lost."""
    return keys.spares if isinstance(keys, SpareKeys) else 0


def moved_on(named: NamedFiles, private: Sequence[PrivateFile]) -> dict[str, Any]:
    """Returns the keys with other values on the nodes; those of secrets that are not sent keep theirs."""
    stay = {file.key for file in named.private.values()} - {file.key for file in private}
    return {key: value for key, value in named.moved.items() if key not in stay}


def port_of(name: str) -> int:
    """Returns a port derived from a name."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return FIRST_PORT + int.from_bytes(digest) % PORTS


def with_layout(loaded: LoadedJob, chosen: ChosenTarget, keys: TargetKeys, hosts: int | None) -> LoadedJob:
    """Returns the job with the planner's layout for the target's nodes, if it has `parallel: auto`."""
    if not loaded.document.planned:
        return loaded
    if keys.cluster is None:
        hint = f"write `cluster: 4x8xH100` under `{chosen.kind}:` of the target, or the layout under `parallel:`"
        raise UserError(loaded.document.problem(("parallel",), "`parallel: auto` needs to know the nodes", hint))
    from stoker.cluster.planned_cluster import target_cluster
    from stoker.launch.auto_parallel import with_plan

    return with_plan(loaded, cluster=target_cluster(chosen, keys, keys.cluster, hosts))


def check_fault_nodes(loaded: LoadedJob, nodes: int) -> None:
    """Raises UserError if `faults.nodes` of the job does not agree with the run's number of nodes."""
    stated = loaded.job.faults.nodes
    if stated is None:
        return
    if stated.max != nodes:
        message = f"`faults.nodes.max` is {stated.max}, and the run has {nodes} node{'s' * (nodes > 1)} on this target"
        hint = f"write `max: {nodes}`, or `nodes: {stated.max}` in the target"
        raise UserError(loaded.document.problem(("faults", "nodes", "max"), message, hint))


def check_synced_store(loaded: LoadedJob, nodes: int) -> None:
    """Raises UserError if `export.sync` of the job writes to a store that only one of the nodes reaches."""
    sync = loaded.job.export.sync
    if sync is not None and nodes > 1 and sync.to.lower().startswith("lmdb://"):
        message = f"LMDB is a folder of one host, and the run has processes on {nodes}"
        raise UserError(loaded.problem("export.sync.to", message, "write redis://HOST:PORT/DB"))


def nodes_and_processes(
    loaded: LoadedJob, chosen: ChosenTarget, keys: TargetKeys, hosts: int | None
) -> tuple[int, int]:
    """Returns (nodes, processes on each) for the layout."""
    layout = layout_of(loaded.job)
    world = layout.world
    words = f"the layout ({layout.describe()}) has {world} process{'es' * (world > 1)}"
    if keys.nodes != "auto" and keys.devices != "auto":
        nodes, devices = keys.nodes, keys.devices
        if nodes * devices != world:
            hint = f"write `parallel: {{data: {nodes * devices}}}`, or change `nodes` and `devices`"
            message = f"{nodes} nodes with {devices} processes are {nodes * devices}, and {words}"
            raise UserError(chosen.problem("nodes", message, hint))
    elif keys.nodes == "auto" and keys.devices != "auto":
        nodes, devices = -(-world // keys.devices), min(keys.devices, world)
    elif keys.nodes != "auto":
        nodes = min(keys.nodes, world)
        devices = -(-world // nodes)
    else:  # the most hosts over which the processes divide evenly
        nodes = next(count for count in range(min(hosts or 1, world), 0, -1) if world % count == 0)
        devices = world // nodes
    if nodes * devices != world:
        near = nodes * (world // nodes)
        fits = next(count for count in range(nodes, 0, -1) if world % count == 0)
        message = f"{words}, which cannot be spread equally over {nodes} nodes"
        hint = f"write `nodes: {fits}`" + (f", or {near} processes" if near else "")
        raise UserError(chosen.problem("nodes" if keys.nodes != "auto" else "devices", message, hint))
    if keys.nodes != "auto" and keys.nodes > world:
        raise UserError(chosen.problem("nodes", f"there are {keys.nodes} nodes, and {words}", f"write at most {world}"))
    if hosts is not None and nodes > hosts:
        beside = " beside its spares" if spares_of(keys) else ""
        message = f"{nodes} nodes are needed, and the target has {hosts} host{'s' * (hosts != 1)}{beside}"
        raise CannotRun(chosen.problem("nodes" if keys.nodes != "auto" else "", message, "name more hosts"))
    return nodes, devices
