"""`stoker plan --on`: clusters, targets by file and name, and the job's own target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from submitting import submission_in, write_job

from stoker.cli.main import main
from stoker.cluster.planned_cluster import PlannedCluster, planned_cluster
from stoker.errors import UserError
from stoker.job import load_job

TARGETS = """
lab:
  ssh: {hosts: [a, b, c], cluster: 8xH100}
hpc:
  slurm: {partition: gpu, nodes: 4, cluster: aws-p5}
bare:
  slurm: {partition: gpu, nodes: 4}
"""


@pytest.fixture(autouse=True)
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config/stoker/targets.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(TARGETS)
    return file


def found(on: str | None, *, targets: bool = True, **keys: Any) -> PlannedCluster:
    return planned_cluster(load_job(write_job(Path(), **keys)), on, targets=targets)


def counted(planned: PlannedCluster) -> tuple[str, int, int]:
    return planned.cluster.device.name, planned.cluster.nodes, planned.cluster.per_node


def test_names_and_files_of_targets_and_clusters() -> None:
    assert counted(found("lab")) == ("H100-80GB-SXM", 3, 8) and found("lab").target == "lab"
    assert counted(found("hpc")) == ("H100-80GB-SXM", 4, 8) and found("hpc").on == "aws-p5"
    Path("there.yaml").write_text("ray: {nodes: 2, devices: 4, cluster: 4xA100}\n")
    assert counted(found("there.yaml"))[1:] == (2, 4)
    Path("cluster.yaml").write_text("device: H100\nnodes: 2\n")
    assert counted(found("cluster.yaml")) == ("H100-80GB-SXM", 2, 8)
    assert counted(found("2x8xH100")) == ("H100-80GB-SXM", 2, 8) and not found("2x8xH100").target


def test_the_jobs_own_target_is_taken_unless_another_is_named() -> None:
    own = {"kubernetes": {"image": "x", "nodes": 3, "cluster": "4xL4"}}
    planned = found(None, target=own)
    assert counted(planned) == ("L4-24GB", 3, 4) and planned.target == "kubernetes"
    assert counted(found("lab", target=own))[0] == "H100-80GB-SXM"
    assert counted(found(None, target="hpc")) == ("H100-80GB-SXM", 4, 8)
    for on, targets in (("local", True), (None, False)):
        assert found(on, targets=targets, target=own).on == "local"
    with pytest.raises(UserError, match="not a device of the catalogue"):
        found("lab", targets=False)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("lob", r"--on lob: neither a cluster nor a target of .*targets.yaml; did you mean lab\?"),
        ("nowhere", r"neither a cluster nor a target of .*targets.yaml; .*targets are lab, hpc, bare"),
        ("4x8xH10O", r"H100"),
        ("gone.yaml", r"gone.yaml: there is no such file"),
        ("bare", r"targets.yaml:7:3: the target does not say what its nodes are; write `cluster: 4x8xH100` under `slu"),
    ],
)
def test_what_is_neither_is_an_error_with_the_nearest(on: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        found(on)
    assert re.search(words, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"cluster": "4xL4", "devices": 8}, r"has 4 devices a node, and `devices` is 8"),
        ({"cluster": "2x4xL4", "nodes": 3}, r"has 2 nodes, and `nodes` is 3"),
        ({"cluster": "4xL44444"}, r"L4"),
        ({"nodes": 3}, r"does not say what its nodes are"),
    ],
)
def test_a_target_that_contradicts_itself_is_refused_at_its_place(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: .*" + words):
        found(None, target={"slurm": keys})


def test_overrides_replace_keys_of_a_named_target() -> None:
    loaded, overrides = load_job(write_job(Path())), ["target.slurm.nodes=2", "target.slurm.cluster=4xL4"]
    assert counted(planned_cluster(loaded, "hpc", overrides=overrides))[1:] == (2, 4)
    with pytest.raises(UserError, match="is not a key of the target lab, which is ssh"):
        planned_cluster(loaded, "lab", overrides=overrides)
    with pytest.raises(UserError, match="has no effect: 4xL4 is a cluster, not a target"):
        planned_cluster(loaded, "4xL4", overrides=overrides)


def test_overrides_of_a_named_target_are_not_the_job_s(capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(Path(), task="pretrain", model="llama3-8b", data="none.jsonl", train={"seq_len": 2048, "batch": 96})
    overrides = ["target.slurm.nodes=2", "target.slurm.cluster=8xH100"]
    assert main(["plan", str(job), "--on", "hpc", *overrides, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["gpus"] == 16


def test_a_cluster_of_other_nodes_than_the_hosts_is_refused() -> None:
    told = r"job.yaml:1:\d+: `cluster: 2x4xL4` has 2 nodes, and the target has 1 host; write a cluster of one node"
    with pytest.raises(UserError, match=told):
        found(None, target={"ssh": {"hosts": ["a"], "cluster": "2x4xL4"}})
    assert counted(found(None, target={"ssh": {"hosts": ["a", "b"], "cluster": "2x4xL4"}}))[1:] == (2, 4)


def test_a_submission_is_planned_for_the_same_nodes() -> None:
    keys = {"slurm": {"cluster": "2xcpu", "nodes": 2}}
    planned = found(None, target=keys, parallel="auto")
    submission = submission_in(Path(), target=keys, parallel="auto", train={"batch": 8})
    assert submission.nodes == planned.cluster.nodes == 2
    assert submission.nodes * submission.devices <= planned.cluster.gpus


@pytest.mark.slow
def test_the_command_plans_for_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(Path(), task="pretrain", model="llama3-8b", data="none.jsonl", train={"seq_len": 2048, "batch": 96})
    plans = {}
    for on in ("lab", "3x8xH100"):
        assert main(["plan", str(job), "--on", on, "--json"]) == 0
        plans[on] = json.loads(capsys.readouterr().out)
    assert plans["lab"]["cluster"]["gpus"] == 24
    assert plans["lab"]["plan"]["layout"] == plans["3x8xH100"]["plan"]["layout"]
    assert main(["plan", str(job), "--on", "lab"]) == 0
    assert "target lab: 3 nodes with 8 x H100-80GB" in capsys.readouterr().out
    assert main(["plan", str(job), "--on", "bare"]) == 2
    assert "write `cluster: 4x8xH100`" in capsys.readouterr().err
