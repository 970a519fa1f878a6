"""A run in the form that the manifests need, built from a submission or from the cluster's config map."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from stoker.job.targets.kubernetes import KubernetesBlock, gang_of
from stoker.job.targets.kubernetes_parts import Gang, Kind

GRACE = 30  # seconds beyond the run's own deadline, for the supervisor to end its workers


@dataclass(frozen=True)
class ClusterRun:
    """A run on a cluster.

    Attributes:
        name: of the run and of all its objects.
        on: the target's name; empty for the job's own block.
        nodes, least: number of pods, and the minimum with which the run continues.
        devices: processes in each pod.
        port: where the supervisors listen.
        output: the run's folder in the pods, absolute.
        overrides: ``key=value`` for paths that differ in the pods.
        deadline: seconds within which the run saves and ends after SIGTERM.
        requeue: exit code of a run that has saved and ended after a signal, to be restarted.
        code: whether Stoker's own code is in the archive.
        fingerprint: digest of all that is sent.
        base: the folder from which it was submitted.
        job: the job file's text.
        stages: names of the stages of a job that has some.
        archive: all other files, as a tar.xz; None if there are none.
    """

    name: str
    on: str
    nodes: int
    least: int
    devices: int
    port: int
    output: str
    overrides: tuple[str, ...]
    deadline: int
    requeue: int
    code: bool
    fingerprint: str
    base: str
    block: KubernetesBlock
    environment: Mapping[str, str]
    job: str
    archive: bytes | None
    stages: tuple[str, ...] = ()

    @property
    def log_folders(self) -> list[str]:
        """The folders of the ranks' logs, one for each stage."""
        return [f"{folder}/logs" for folder in ([f"{self.output}/{name}" for name in self.stages] or [self.output])]

    @property
    def kind(self) -> Kind:
        """The kind of the workload."""
        return self.block.kind

    @property
    def gang(self) -> Gang:
        """The gang scheduler of the pods."""
        return gang_of(self.block)

    @property
    def grace(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        return self.deadline + GRACE

    def host(self, index: int) -> str:
        """Returns the host name of a node's pod in its namespace; not of a RayJob, whose pods have none."""
        assert self.kind != "rayjob"
        between = {"job": "", "jobset": "node-0-", "trainjob": "node-0-", "volcano": "node-"}[self.kind]
        return f"{self.name}-{between}{index}.{self.name}"

    def rendezvous(self) -> list[str]:
        """``HOST:PORT`` of all nodes."""
        return [f"{self.host(index)}:{self.port}" for index in range(self.nodes)]

    def record_text(self) -> str:
        """Returns the run without job and archive, as the config map stores it."""
        block = self.block.model_dump(mode="json", exclude_unset=True)
        kept = {key: value for key, value in vars(self).items() if key not in ("job", "archive", "block")}
        return json.dumps({**kept, "target": block}, indent=2, default=dict) + "\n"

    @classmethod
    def from_record(cls, text: str, job: str, archive: bytes | None) -> Self:
        """Restores the run of a config map.

        Raises:
            ValueError: the text is not a submission.
        """
        values: dict[str, Any] = json.loads(text)
        try:
            block = KubernetesBlock.model_validate(values.pop("target"))
            for key in ("overrides", "stages"):
                values[key] = tuple(values.get(key, ()))
            return cls(**values, block=block, job=job, archive=archive)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a submission record: {error}") from None
