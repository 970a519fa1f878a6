"""Targets of a job, a file and the user's configuration; each error has its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from submitting import write_job

from stoker.cluster.chosen_target import choose_target
from stoker.errors import UserError
from stoker.job import load_job
from stoker.job.load_job import LoadedJob


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedJob:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return load_job(write_job(tmp_path, target={"ssh": {"hosts": ["a"]}}))


def test_the_command_line_wins_over_the_job(loaded: LoadedJob, tmp_path: Path) -> None:
    assert choose_target(loaded, None).kind == "ssh"
    (tmp_path / "cluster.yaml").write_text("slurm:\n  partition: gpu\n")
    assert choose_target(loaded, "cluster.yaml").block.partition == "gpu"  # type: ignore[attr-defined]
    (tmp_path / "config/stoker").mkdir(parents=True)
    (tmp_path / "config/stoker/targets.yaml").write_text("mine:\n  ray: {nodes: 2}\n")
    chosen = choose_target(loaded, "mine")
    assert (chosen.kind, chosen.name, chosen.block.nodes) == ("ray", "mine", 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("slurm:\n  partitions: gpu\n", "t.yaml:2:3: unknown key `slurm.partitions`; write `partition`"),
        ("slurm:\n  gpus: 8\n", "t.yaml:2:3: unknown key `slurm.gpus`; write `devices`"),
        ("slurm:\n  nodes: 0\n", "t.yaml:2:10: `slurm.nodes` must be a whole number above 0 or auto, not 0"),
        ("slrm: {}\n", "t.yaml:1:1: unknown key `slrm`; write `slurm`"),
        ("target:\n  slurm:\n    nodes: 0\n", "t.yaml:3:12: `target.slurm.nodes` must be a whole number above 0"),
        ("target: lab\n", "t.yaml:1:9: a target must be a block"),
        ("ssh: {hosts: [a], environment: {'A B': x}}\n", "t.yaml:1:33: `A B` cannot be a name in `ssh.environment`"),
        ("ray: {environment: {1A: x}}\n", "t.yaml:1:21: `1A` cannot be a name in `ray.environment`"),
        ("slurm: {}\nray: {}\n", "t.yaml:1:1: a target must have exactly one block"),
        ("- slurm\n", "t.yaml:1:1: a target must be a block"),
    ],
)
def test_mistakes_in_a_file_are_found_in_it(loaded: LoadedJob, text: str, told: str) -> None:
    Path("t.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        choose_target(loaded, "t.yaml")
    assert str(error.value).startswith(told)


def test_a_file_may_have_the_block_as_a_job_has_it(loaded: LoadedJob) -> None:
    Path("t.yaml").write_text("target:\n  slurm: {partition: gpu}\n")
    assert choose_target(loaded, "t.yaml").block.partition == "gpu"  # type: ignore[attr-defined]


def test_overrides_replace_keys_of_a_named_target(loaded: LoadedJob) -> None:
    Path("t.yaml").write_text("slurm: {partition: gpu, nodes: 2}\n")
    chosen = choose_target(loaded, "t.yaml", ["target.slurm.partition=long", "target.slurm.cpus=4"])
    block = chosen.block
    assert (block.partition, block.nodes, block.cpus) == ("long", 2, 4)  # type: ignore[attr-defined]
    for text, told in (
        (
            "target.ssh.nodes=2",
            "`target.ssh.nodes=2` is not a key of the target t.yaml, which is slurm; write, for example,",
        ),
        ("target.nodes=2", "`target.nodes=2` is not a key of the target t.yaml, which is slurm"),
        ("target.slurm.partion=x", "in `target.slurm.partion=x`: unknown key `target.slurm.partion`; write `partition"),
        ("target.slurm.nodes=0", "in `target.slurm.nodes=0`: `target.slurm.nodes` must be a whole number above 0"),
    ):
        with pytest.raises(UserError) as error:
            choose_target(loaded, "t.yaml", [text])
        assert str(error.value).startswith(f"command line: {told}") and error.value.exit_code == 2


def test_unknown_names_suggest_the_nearest(loaded: LoadedJob, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--on nowhere: there is no target nowhere in .*targets.yaml"):
        choose_target(loaded, "nowhere")
    with pytest.raises(UserError, match=r"there is no file cluster.yaml"):
        choose_target(loaded, "cluster.yaml")
    (tmp_path / "config/stoker").mkdir(parents=True)
    (tmp_path / "config/stoker/targets.yaml").write_text("lab:\n  slurm: {nods: 2}\n")
    with pytest.raises(UserError, match="did you mean lab"):
        choose_target(loaded, "lob")
    with pytest.raises(UserError, match=r"targets.yaml:2:11: unknown key `slurm.nods`; write `nodes`"):
        choose_target(loaded, "lab")
    with pytest.raises(UserError, match="is not a target of"):
        choose_target(loaded, "local")


def test_a_job_without_a_target_is_told_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job.yaml:1:1: the job has no target"):
        choose_target(load_job(write_job(tmp_path)), None)


def test_the_schema_for_editors_knows_the_targets() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from stoker.job.keys.editor_schema import editor_schema

    validator = jsonschema.Draft202012Validator(editor_schema())
    base = {"task": "sft", "model": "m", "data": "d"}
    for good in ("slurm: {partition: gpu, time: 60}", "ssh: {hosts: [a slots=2]}", "ray: {}"):
        assert not list(validator.iter_errors({**base, "target": yaml.safe_load(good)}))
    assert not list(validator.iter_errors({**base, "target": "lab"}))
    assert list(validator.iter_errors({**base, "target": {"slurm": {"partitions": "gpu"}}}))
