"""Credentials that a job on other machines needs, and that are not sent, are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from submitting import submission_in

from stoker.cluster.unsent_credentials import unsent_credentials
from stoker.job.targets.ray import RayBlock
from stoker.job.targets.slurm import SlurmBlock
from stoker.job.targets.ssh import SshBlock

SET = {"AWS_ACCESS_KEY_ID": "me", "OSS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "hunter2"}


@pytest.mark.parametrize(
    ("to", "block", "told"),
    [
        ("s3://runs/mine", {}, True),
        ("s3://runs/mine", {"forward": ["AWS_*"]}, False),
        ("s3://runs/mine", {"environment": {"AWS_ACCESS_KEY_ID": "other"}}, False),
        ("runs/mine", {}, False),
    ],
)
def test_a_key_that_is_not_sent_is_named(tmp_path: Path, to: str, block: dict[str, Any], told: bool) -> None:
    submission = submission_in(tmp_path, target={"ssh": {"hosts": ["a"]}}, checkpoint={"to": to})
    lines = unsent_credentials(submission, SshBlock(hosts=["a"], **block), SET)
    start = "AWS_ACCESS_KEY_ID is not sent to the nodes: add AWS_* to `forward`"
    assert len(lines) == told and all(line.startswith(start) for line in lines)
    assert not unsent_credentials(submission, SshBlock(hosts=["a"], **block), {})
    assert not unsent_credentials(submission, RayBlock(), SET)
    assert not unsent_credentials(submission, SlurmBlock(), SET)  # sbatch hands them on
    assert unsent_credentials(submission, SlurmBlock(login="me@there", **block), SET) == lines
